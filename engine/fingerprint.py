"""The fingerprint of a deterministic engine: equal ones promise equal tokens.

For requests that are greedy or bring a seed: a seed that an engine picks depends on what else it
took before.

A digest of everything that decides tokens: the sources, the libraries, the device, the parameters,
the sizes, the optimised programs themselves, the ids that end an output, and the tokenizer, on
which stop strings, guides and the ids of a text depend. What only decides when a request runs
(policy, queues, host memory) is not in it.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Sequence
from itertools import batched
from pathlib import Path

import jax
import numpy as np

from ..configs.engine_config import EngineConfig
from ..models.base_tokenizer import Tokenizer
from .admission import EngineLimits
from .source_digest import source_digest
from .typed_hash import typed_hash

FOLDERS = ("configs", "engine", "models", "pallas_kernels", "server")
"""Of the package: from a request on the wire to its output. The server holds the defaults of what a
request leaves out, and finds the token at which a stop string ends an output."""

CONFIG_FIELDS = (
    "tensor_parallel_size",
    "dtype",
    "max_num_seqs",
    "prefill_chunk_tokens",
    "page_size",
    "max_stop_ids",
)

LIBRARIES = ("jax", "jaxlib", "llguidance", "tokenizers", "sentencepiece", "jinja2")
"""That make ids of texts, masks of guides and programs of sources."""

_TOKENS_PER_TEXT = 256

# Where in the sources an instruction comes from. It differs between a program that was compiled and
# the same out of the persistent cache, which keeps that of whoever compiled it first.
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"[^"]*"|\{[^{}]*\})*\}')
_TABLES = {"FileNames", "FunctionNames", "FileLocations", "StackFrames"}


def fingerprint(
    config: EngineConfig,
    limits: EngineLimits,
    parameters: Sequence[jax.Array],
    programs: Sequence[str],
    device: jax.Device,
    tokenizer: Tokenizer | None,
) -> str:
    """The digest, in hexadecimal.

    Args:
      config: Of the engine.
      limits: What was resolved from it.
      parameters: All leaves of the model. They are brought to the host and hashed, at about a
        second for each gigabyte; so it is the same for one model in different formats.
      programs: Texts of the optimised executables.
      device: That runs them.
      tokenizer: The model's. None: nothing but ids comes and goes.
    """
    sizes = [f"{name}={getattr(config, name)}" for name in CONFIG_FIELDS]
    sizes += [f"num_pages={limits.num_pages}", f"max_model_len={limits.max_model_len}"]
    return typed_hash(
        (b"version", importlib.metadata.version("octavo").encode()),
        (b"source", source_digest(FOLDERS)),
        (b"libraries", "\n".join(map(importlib.metadata.version, LIBRARIES)).encode()),
        (b"device", device_description(device).encode()),
        (b"sizes", "\n".join(sizes).encode()),
        (b"ends", repr(limits.eos_token_ids).encode()),
        (b"tokenizer", b"" if tokenizer is None else tokenizer_digest(tokenizer)),
        (b"parameters", parameters_digest(parameters)),
        *((b"program", digest) for digest in sorted(map(program_digest, programs))),
    ).hex()


def parameters_digest(parameters: Sequence[jax.Array]) -> bytes:
    """Of their types, shapes and bytes, in order; one at a time, so host memory holds one copy."""
    digest = hashlib.sha256()
    for leaf in parameters:
        digest.update(f"{leaf.dtype} {leaf.shape}\n".encode())
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return digest.digest()


def tokenizer_digest(tokenizer: Tokenizer) -> bytes:
    """Of its settings, the bytes of every id, and the ids of texts that hold all of them.

    Those texts stand for the merges or scores, which no tokenizer tells.
    """
    settings = tokenizer.settings
    values = dataclasses.asdict(settings) | {"eos_token_ids": sorted(settings.eos_token_ids)}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    for token in tokens:
        digest.update(len(token).to_bytes(8, "little") + token)
    for group in batched(tokens, _TOKENS_PER_TEXT):
        text = b"".join(group).decode(errors="ignore")
        try:
            ids = f"{tokenizer.encode(text, add_special_tokens=True)}"
        except ValueError:  # they spell control tokens too, which ordinary text may be unable to
            ids = "none"
        digest.update(f"{ids}\n".encode())
    return digest.digest()


def program_digest(text: str) -> bytes:
    """Of an optimised program's text without what says where in the sources it comes from."""
    kept: list[str] = []
    is_table = False
    for line in text.splitlines():
        if line in _TABLES:
            is_table = True
        elif is_table:
            is_table = line != ""
        else:
            kept.append(_METADATA.sub("", line))
    return hashlib.sha256("\n".join(kept).encode()).digest()


def device_description(device: jax.Device) -> str:
    """Kind and driver of a device; of a CPU what its libraries choose their code by."""
    words = [device.platform, device.device_kind, device.client.platform_version]
    words += [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    if device.platform == "cpu":
        # The number of threads decides how library matmuls split their work.
        num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        words += [platform.machine(), _processor(), str(os.cpu_count()), str(num_threads)]
    return "\n".join(words)


def _processor() -> str:
    """Its model and the instructions that it has, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    found = {line.partition(":")[0].strip(): line for line in lines if line.startswith(wanted)}
    return "\n".join(found[name] for name in sorted(found))

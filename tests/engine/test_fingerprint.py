"""Fingerprints: the same for the same engine, however its programs came about; else another."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.configs.scheduling_config import SchedulingConfig
from octavo.engine import build
from octavo.engine import fingerprint as module
from octavo.engine.admission import EngineLimits
from octavo.engine.fingerprint import (
    fingerprint,
    parameters_digest,
    program_digest,
    tokenizer_digest,
)
from octavo.engine.source_digest import source_digest
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from tests.models.tiny_checkpoints import (
    random_tensors,
    tiny_config,
    write_huggingface,
    write_huggingface_tokenizer,
    write_unigram_tokenizer,
)

from .conftest import Model, ignore_progress
from .fakes import limits_for
from .test_deterministic import CONFIG as BUILT

CONFIG = EngineConfig(deterministic=True, prefill_chunk_tokens=32)
LIMITS = limits_for(CONFIG, 64)
FOLDERS = ("configs", "engine", "models", "pallas_kernels", "server")
MERGE = '[\n        "Ġ",\n        "t"\n      ]'
PARAMETERS = [jnp.arange(6.0).reshape(2, 3), jnp.ones(2, jnp.bfloat16)]


def digest(
    config: EngineConfig = CONFIG,
    limits: EngineLimits = LIMITS,
    parameters: list[jax.Array] = PARAMETERS,
    programs: tuple[str, ...] = ("one", "two"),
    tokenizer: Tokenizer | None = None,
) -> str:
    return fingerprint(config, limits, parameters, programs, jax.devices()[0], tokenizer)


def test_it_changes_with_whatever_decides_bits() -> None:
    others = [
        digest(replace(CONFIG, dtype="float32")),
        digest(replace(CONFIG, max_num_seqs=31)),
        digest(replace(CONFIG, prefill_chunk_tokens=48)),
        digest(limits=replace(LIMITS, num_pages=65)),
        digest(limits=replace(LIMITS, max_model_len=99)),
        digest(limits=replace(LIMITS, eos_token_ids=(7, 8))),
        digest(parameters=[PARAMETERS[0] + 1, PARAMETERS[1]]),
        digest(parameters=[PARAMETERS[0].reshape(3, 2), PARAMETERS[1]]),
        digest(programs=("one", "three")),
        digest(programs=("one",)),
    ]
    assert digest() not in others
    assert len(set(others)) == len(others)
    assert len(digest()) == 32
    int(digest(), 16)


def test_it_does_not_change_with_what_decides_only_when_a_request_runs() -> None:
    fair = SchedulingConfig(policy="fair", max_num_queued=3, prefix_cache=False)
    changed = replace(CONFIG, scheduling=fair, host_kv_bytes=1 << 20, seed=3)
    assert digest(changed, programs=("two", "one")) == digest()


@pytest.mark.parametrize("name", [*module.LIBRARIES, "octavo"])
def test_it_changes_with_the_version_of_each_library(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, version = digest(), module.importlib.metadata.version

    def another(package: str) -> str:
        return "9.9.9" if package == name else version(package)

    monkeypatch.setattr(module.importlib.metadata, "version", another)
    assert digest() != before


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS", "processor", "source"])
def test_it_changes_with_build_and_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest()
    match name:
        case "XLA_FLAGS" | "LIBTPU_INIT_ARGS":
            monkeypatch.setenv(name, "--xla_cpu_enable_fast_math=true")
        case "processor":
            monkeypatch.setattr(module, "_processor", lambda: "another one")
        case _:
            monkeypatch.setattr(module, "source_digest", _say(b"another one"))
    assert digest() != before


def _say(value: str | bytes) -> Callable[[Any], str | bytes]:
    def say(_: Any) -> str | bytes:
        return value

    return say


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_huggingface_tokenizer(folder)
    return folder


def _changed(folder: Path, to: Path, file: str, old: str, new: str) -> Tokenizer:
    """The tokenizer with one word of one file replaced."""
    for path in folder.iterdir():
        text = path.read_text()
        if path.name == file:
            assert old in text
            text = text.replace(old, new)
        (to / path.name).write_text(text)
    return load_tokenizer(to)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tokenizer.json", '"a": 97,\n      "b": 98', '"a": 98,\n      "b": 97'),
        ("tokenizer.json", MERGE, ""),  # how a text is cut, all ids as they were
        ("tokenizer_config.json", '"add_bos_token": false', '"add_bos_token": true'),
        ("tokenizer_config.json", '"eos_token": "<|im_end|>"', '"eos_token": "<|im_start|>"'),
        ("chat_template.jinja", "assistant", "model"),
    ],
)
def test_it_changes_with_the_tokenizer(
    file: str, old: str, new: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    before = digest(tokenizer=load_tokenizer(tokenizer_folder))
    assert digest(tokenizer=_changed(tokenizer_folder, tmp_path, file, old, new)) != before
    assert before != digest()


def test_a_copy_of_a_tokenizer_counts_alike(tokenizer_folder: Path, tmp_path: Path) -> None:
    copy = _changed(tokenizer_folder, tmp_path, "tokenizer.json", "ByteLevel", "ByteLevel")
    assert tokenizer_digest(copy) == tokenizer_digest(load_tokenizer(tokenizer_folder))


@pytest.mark.parametrize(("control", "has_unknown"), [("§", True), ("</s>", False)])
def test_a_tokenizer_whose_control_token_no_text_can_spell_has_one_too(
    control: str, has_unknown: bool, tmp_path: Path
) -> None:
    """Or a deterministic engine of it would not start."""
    found: set[bytes] = set()
    for letters in ("ab", "ba"):
        write_unigram_tokenizer(tmp_path, control, letters, has_unknown=has_unknown)
        tokenizer = load_tokenizer(tmp_path)
        with pytest.raises(ValueError, match="encode"):  # else it can be spelled after all
            tokenizer.encode(control, add_special_tokens=False)
        found.add(tokenizer_digest(tokenizer))
    assert len(found) == 2


def test_two_builds_of_the_same_have_the_same(
    tiny_model: Model, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a build passes on what it is given: the tokenizer, and the ids that end an output."""
    seen: list[tuple[Any, ...]] = []

    def watched(*args: Any) -> str:
        seen.append(args)
        return fingerprint(*args)

    monkeypatch.setattr(build, "fingerprint", watched)
    tokenizer = load_tokenizer(tokenizer_folder)
    first, second = (
        build.build_engine(
            tiny_model.checkpoint,
            BUILT,
            eos_token_ids=frozenset({258, 9}),
            clock=time.monotonic,
            on_progress=ignore_progress,
            tokenizer=tokenizer,
        ).fingerprint
        for _ in range(2)
    )
    assert first == second
    _, limits, _, programs, _, passed = seen[0]
    assert limits.eos_token_ids == (9, 258)
    assert len(programs) > 0
    assert passed is tokenizer


def test_the_sources_count_by_name_and_content(tmp_path: Path) -> None:
    """Of every folder that a served token passes: the server's too, which ends outputs."""
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("x = 1\n")
        (tmp_path / folder / "notes.md").write_text("nothing")
    seen = [source_digest(module.FOLDERS, tmp_path)]
    (tmp_path / "engine" / "notes.md").write_text("something")
    assert source_digest(module.FOLDERS, tmp_path) == seen[0]
    changes: list[Callable[[], Any]] = [
        *(partial((tmp_path / folder / "a.py").write_text, "x = 3\n") for folder in FOLDERS),
        lambda: (tmp_path / "models" / "a.py").write_text("x = 2\n"),
        lambda: (tmp_path / "models" / "a.py").rename(tmp_path / "models" / "b.py"),
        lambda: (tmp_path / "configs" / "p.toml").write_text(""),
    ]
    for change in changes:
        change()
        seen.append(source_digest(module.FOLDERS, tmp_path))
    assert len(set(seen)) == len(seen)


def test_parameters_count_bit_by_bit() -> None:
    zero, minus_zero = jnp.zeros(3), -jnp.zeros(3)
    assert np.array_equal(zero, minus_zero)
    assert parameters_digest([zero]) != parameters_digest([minus_zero])


def test_a_program_counts_without_where_it_comes_from() -> None:
    """Two functions that compile to the same: their places in this file differ, their sums do not.

    If a new XLA writes down places otherwise, digests out of the cache would differ: it fails here.
    """

    def one(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ x

    def another(x: jax.Array) -> jax.Array:
        y = jnp.sin(x)

        return y @ x

    def third(x: jax.Array) -> jax.Array:
        return jnp.cos(x) @ x

    x = jnp.ones((3, 3))
    texts: list[str] = []
    for function in (one, another, third):
        function.__name__ = "same"
        text = jax.jit(function).lower(x).compile().as_text()
        assert text is not None
        texts.append(text)
    # The second may have come out of the cache, with the places of the first: one more by hand.
    moved = texts[0].replace("stack_frame_id=", "stack_frame_id=1").replace("line=", "line=7")
    assert moved != texts[0]
    assert program_digest(moved) == program_digest(texts[0])
    assert program_digest(texts[0]) == program_digest(texts[1]) != program_digest(texts[2])


@pytest.mark.full
def test_it_is_the_same_in_every_process_and_out_of_the_cache(tmp_path: Path) -> None:
    """Compiled without a cache, into an empty one, and taken out of it: three processes."""
    config = tiny_config()
    write_huggingface(tmp_path / "model", config, random_tensors(config))
    cache = tmp_path / "cache"
    found = [_build_elsewhere(tmp_path / "model", where) for where in (None, cache, cache)]
    assert {each["fingerprint"] for each in found} == {found[0]["fingerprint"]}
    assert found[0]["fingerprint"]
    assert found[2]["compile_s"] < found[1]["compile_s"] / 2, "nothing came out of the cache"


def _build_elsewhere(model: Path, cache: Path | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine.build_elsewhere", str(model), str(cache or "")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

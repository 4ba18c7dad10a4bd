"""Builds a deterministic engine in a process of its own; prints fingerprint and compile time.

Arguments: the folder of a model, and that of the compilation cache or nothing. A module, not a text
inside a test: so the linter sees what it lacks.
"""

import json
import sys
import time
from pathlib import Path

from octavo.configs.engine_config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.compilation import use_persistent_cache
from octavo.models.checkpoint import open_checkpoint

from .conftest import ignore_progress


def main(model: str, cache: str) -> None:
    if cache:
        use_persistent_cache(Path(cache))
    built = build_engine(
        open_checkpoint(Path(model)),
        EngineConfig(
            deterministic=True,
            dtype="float32",
            max_num_seqs=2,
            prefill_chunk_tokens=16,
            num_pages=16,
            max_model_len=64,
            host_kv_bytes=1 << 20,
        ),
        eos_token_ids=frozenset({258}),
        clock=time.monotonic,
        on_progress=ignore_progress,
    )
    print(json.dumps({"fingerprint": built.fingerprint, "compile_s": built.compile_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])

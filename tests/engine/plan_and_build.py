"""Plans and builds an engine for all devices of its process; prints the pages of both.

Arguments: the folder of a model, how many pages the memory shall hold, host_kv_bytes, and the
folder of the compilation cache. A process of its own has as many devices as $XLA_FLAGS says.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax

from octavo.configs.chips import parse_chips
from octavo.configs.engine_config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.compilation import use_persistent_cache
from octavo.engine.kv_budget import grown
from octavo.engine.plan_compile import compile_plan
from octavo.engine.plan_figures import memory
from octavo.engine.plan_records import CompiledPlan, PlanJob
from octavo.models.checkpoint import open_checkpoint

from .conftest import ignore_progress


def ignore_step(done: int, total: int) -> None:
    """Nobody waits."""


def plan(job: PlanJob) -> CompiledPlan:
    return compile_plan(job, jax.devices(), ignore_step)


def main(folder: str, pages: str, host_kv_bytes: int, cache: str) -> None:
    use_persistent_cache(Path(cache))
    checkpoint = open_checkpoint(Path(folder))
    (devices,) = parse_chips(f"cpu-{jax.device_count()}")
    config = EngineConfig(
        dtype="float32",
        tensor_parallel_size=devices.count,
        deterministic=True,  # one executable, to be quick
        max_num_seqs=2,
        page_size=16,
        prefill_chunk_tokens=16,
        device_memory_bytes=1 << 30,
        host_kv_bytes=host_kv_bytes,
    )
    job = PlanJob(
        model=checkpoint.config,
        config=config,
        devices=devices,
        host_bytes=1 << 40,
        host_free_bytes=0,
        compiles_all=False,
        max_layers=32,
    )
    # All but the pages, and so many pages: far from what the slots could use at most.
    plenty = plan(job)
    sizes = memory(job, plenty)
    rest = sum(sizes[f"{name}_bytes"] for name in ("parameter", "slot"))
    rest += sum(grown(sizes[f"{name}_bytes"]) for name in ("temporary", "program"))
    limit_bytes = rest + int(float(pages) * plenty.page_bytes)
    config = replace(config, device_memory_bytes=limit_bytes)
    planned = plan(replace(job, config=config))
    built = build_engine(
        checkpoint,
        config,
        eos_token_ids=checkpoint.eos_token_ids,
        clock=time.monotonic,
        on_progress=ignore_progress,
    )
    told = {"planned": planned.num_pages, "built": built.engine.limits.num_pages}
    told |= {"kinds": [each.kind for each in planned.executables]}
    told |= {"plenty": plenty.num_pages, "reason": planned.reason, "attention": planned.attention}
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])

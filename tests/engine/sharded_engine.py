"""Runs requests on an engine over several virtual CPU devices, in a process of its own.

Reads a JSON object from standard input: `runs`, a list of {model, config, prompts, max_tokens}, and
maybe `kernels`, "tpu" or "gpu": those attend then, in their interpreter.
Prints a JSON list with what each gave. The number of devices is that of the process: see
XLA_FLAGS=--xla_force_host_platform_device_count.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from octavo.configs.engine_config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.compilation import compile_events, use_persistent_cache
from octavo.engine.executor import DeviceExecutor
from octavo.engine.step_shapes import StepKey
from octavo.models.checkpoint import open_checkpoint
from octavo.models.fetch import default_cache_dir
from octavo.pallas_kernels.gpu_backend import GpuBackend
from octavo.pallas_kernels.tpu_backend import TpuBackend
from tests.pallas_kernels.gpu_subject import H100

from .conftest import ignore_progress
from .fakes import add_request, finish, request

BACKENDS = {
    "": None,
    "tpu": TpuBackend(interpret="yes"),
    "gpu": GpuBackend(H100, interpret="yes"),
}


def run(
    model: str,
    config: dict[str, Any],
    prompts: list[list[int]],
    max_tokens: int,
    kernels: str = "",
) -> Any:
    engine = build_engine(
        open_checkpoint(Path(model)),
        EngineConfig(**config, tensor_parallel_size=jax.device_count()),
        eos_token_ids=frozenset(),
        clock=time.monotonic,
        on_progress=ignore_progress,
        backend=BACKENDS[kernels],
    ).engine
    executor = engine._executor
    assert isinstance(executor, DeviceExecutor)
    dispatched: list[StepKey] = []
    executor.dispatch = _counting(executor.dispatch, dispatched)
    ready = compile_events()
    for number, prompt in enumerate(prompts):
        add_request(engine, request(str(number), prompt, max_tokens=max_tokens, logprobs=True))
    answers = finish(engine)
    kv, load = executor._state[: executor._num_kv_leaves], engine.load()
    return {
        "token_ids": [answers[str(number)].token_ids for number in range(len(prompts))],
        "logprobs": [answers[str(number)].logprobs for number in range(len(prompts))],
        "num_steps": load.steps_total,
        "num_dispatches": len(dispatched),
        "num_preemptions": load.preemptions_total,
        "num_imported_pages": load.imported_pages_total,
        "compile_events": compile_events() - ready,
        "num_pages": engine.limits.num_pages,
        "kv_bytes_per_device": sum(leaf.addressable_shards[0].data.nbytes for leaf in kv),
    }


def _counting(dispatch: Callable[..., jax.Array], keys: list[StepKey]) -> Callable[..., jax.Array]:
    def counted(key: StepKey, *arrays: np.ndarray | None) -> jax.Array:
        keys.append(key)
        return dispatch(key, *arrays)

    return counted


if __name__ == "__main__":
    use_persistent_cache(default_cache_dir() / "compiled-by-tests")
    json.dump([run(**one) for one in json.load(sys.stdin)["runs"]], sys.stdout)

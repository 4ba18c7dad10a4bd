"""Whole requests with the TPU and GPU kernels in their interpreters, against the reference backend.

Prompts in chunks, prefix hits and preemption, through the real steps: what would break it is a
kernel that is right by itself and reads the wrong place of the engine's pages, a work list that an
inactive row or an empty chunk upsets, a layout that a page does not survive.
"""

from collections.abc import Callable

import numpy as np
import pytest

from octavo.bench.device_serving import Answer, compare, greedy_answers
from octavo.configs.engine_config import EngineConfig
from octavo.engine.compilation import compile_events
from octavo.models.checkpoint import open_checkpoint
from octavo.pallas_kernels.backend import AttentionBackend
from octavo.pallas_kernels.gpu_backend import GpuBackend
from octavo.pallas_kernels.reference_backend import ReferenceBackend
from octavo.pallas_kernels.tpu_backend import TpuBackend
from tests.models.tiny_checkpoints import random_tensors, tiny_config, write_huggingface
from tests.pallas_kernels.gpu_subject import H100

from .conftest import Model

MAX_TOKENS = 24

# Two executables. Two requests do not fit the pool to their ends.
CONFIG = EngineConfig(
    dtype="bfloat16",
    max_num_seqs=2,
    prefill_chunk_tokens=16,
    page_size=16,
    num_pages=7,
    max_model_len=96,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = tiny_config(head_dim=64)
    folder = tmp_path_factory.mktemp("kernels") / "model"
    write_huggingface(folder, config, random_tensors(config), dtype=np.float32)
    return Model(open_checkpoint(folder))


def run(model: Model, backend: AttentionBackend) -> list[Answer]:
    engine = model.build(CONFIG, backend=backend)
    ready = compile_events()
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 320, 36).tolist()
    prompts: list[list[int]] = []
    for length, is_shared in [(1, False), (17, False), (3, True), (30, False), (9, True)]:
        own = rng.integers(0, 320, length).tolist()
        prompts.append([*shared, *own] if is_shared else own)
    answers = greedy_answers(engine, prompts, MAX_TOKENS, has_gaps=True)
    load = engine.load()
    assert load.preemptions_total, "the pool is too large to show anything"
    assert load.cached_tokens_total, "nobody hit the prefix cache"
    assert compile_events() == ready
    return answers


@pytest.fixture(scope="module")
def expected(model: Model) -> list[Answer]:
    return run(model, ReferenceBackend())


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(lambda: TpuBackend(interpret="yes"), id="tpu"),
        pytest.param(lambda: GpuBackend(H100, interpret="yes"), id="gpu", marks=pytest.mark.full),
    ],
)
def test_ids_are_those_of_the_reference(
    model: Model, expected: list[Answer], backend: Callable[[], AttentionBackend]
):
    num_equal, faults = compare(run(model, backend()), expected, MAX_TOKENS)
    assert faults == []
    least = 0.7 * MAX_TOKENS * len(expected)
    assert num_equal > least, "close calls ended most comparisons"

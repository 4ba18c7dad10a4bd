"""The GPU kernels in Pallas' interpreter: races are errors, memory that nobody wrote is NaN."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.pallas_kernels import gpu_copies, gpu_softmax
from octavo.pallas_kernels.gpu_backend import GpuBackend
from octavo.pallas_kernels.gpu_budget import GpuChip

from .attention_cases import EVERYTHING, Options, Shape, make_case
from .attention_checks import (
    check_equals_the_oracle,
    check_free_places_change_no_bit,
    check_nan_poisons_nobody_else,
    check_rows_are_alone,
    check_segments_are_alone,
    named_case,
    some_cases,
)
from .attention_steps import Subject
from .gpu_subject import GPU, reset_interpreter
from .whole_table import whole_table

# Together: one row and several, which blocks share; groups of 1 to 16, with heads that fill a
# block and that don't; pages that are smaller than a tile, larger, and no divisor of it; heads as
# wide as a product, wider, and padded; every option.
SHAPES = [
    Shape(rows=1, chunk=0, page_size=16, kv_heads=1, group=16, head_dim=128, dtype="bfloat16"),
    Shape(rows=3, chunk=0, page_size=40, kv_heads=2, group=3, head_dim=64, dtype="bfloat16"),
    Shape(
        rows=4,
        chunk=0,
        page_size=256,
        kv_heads=1,
        group=1,
        head_dim=256,
        dtype="bfloat16",
        options=EVERYTHING,
    ),
    Shape(rows=2, chunk=48, page_size=64, kv_heads=1, group=4, head_dim=80, dtype="bfloat16"),
    Shape(
        rows=1,
        chunk=16,
        page_size=24,
        kv_heads=2,
        group=7,
        head_dim=64,
        dtype="bfloat16",
        max_len=300,
        options=EVERYTHING,
    ),
    Shape(
        rows=1,
        chunk=72,
        page_size=32,
        kv_heads=1,
        group=1,
        head_dim=256,
        dtype="bfloat16",
        max_len=200,
        options=Options(window=45),
    ),
]
DECODE, MIXED = SHAPES[1], SHAPES[3]


@pytest.fixture(autouse=True)
def _clean_interpreter() -> None:
    """What a failed kernel left behind would fail the next one."""
    reset_interpreter()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle_and_stores_what_it_should(shape: Shape):
    for case in some_cases(shape, SHAPES.index(shape), 4):
        check_equals_the_oracle(GPU, shape, case)


@pytest.mark.full
@whole_table("bfloat16")
def test_the_whole_table(shape: Shape, name: str):
    check_equals_the_oracle(GPU, shape, named_case(shape, name))


def test_what_free_places_and_padding_hold_changes_no_bit():
    check_free_places_change_no_bit(GPU, MIXED, make_case(MIXED, [65, 0], [(70, 9), (0, 20)]))


def test_a_row_does_not_depend_on_its_neighbours():
    check_rows_are_alone(GPU, DECODE)


def test_a_segment_does_not_depend_on_its_neighbours():
    check_segments_are_alone(GPU, MIXED)


def test_a_request_whose_kv_is_nan_poisons_nobody_else():
    check_nan_poisons_nobody_else(GPU, MIXED)


@pytest.mark.full
def test_two_devices_give_what_one_gives():
    """Under shard_map with the heads dealt, as the engine runs steps."""
    flags = "--xla_force_host_platform_device_count=2"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.pallas_kernels.gpu_sharded_step"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def _no_wait(pages: Any, slot: Any, tiles_left: Any) -> None:
    """A kernel that reads a slot before its copies have arrived."""


def _no_release(ring: Any) -> None:
    """A kernel that overwrites a slot that may still be read."""


def _no_mask(scores: Any, seen: Any) -> Any:
    """A kernel that weighs what lies past a row's last token."""
    return scores


def _no_clearing(values: Any, *_: Any) -> Any:
    """A kernel that gives what lies past a row's last token a weight of 0, which is not enough."""
    return values


@pytest.mark.parametrize(
    ("module", "name", "broken", "message"),
    [
        (gpu_copies, "wait", _no_wait, "RACE DETECTED"),
        (gpu_copies, "release", _no_release, "RACE DETECTED"),
        (gpu_softmax, "mask_scores", _no_mask, "was read"),
        (gpu_softmax, "clear_unseen", _no_clearing, "was read"),
    ],
)
@pytest.mark.parametrize("chunk", [0, 16], ids=["decode", "prefill"])
def test_a_broken_kernel_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    broken: Callable[..., Any],
    message: str,
    chunk: int,
):
    """By the same check that a right one passes; else its passing would say little."""
    # One multiprocessor, so that one block goes round its ring.
    backend = GpuBackend(GpuChip(compute_capability=90, num_sms=1), interpret="races")
    # As no other subject is, so that it is compiled anew.
    subject = Subject(backend, lambda k, v: GPU.pack(k, v), GPU.unpack)
    shape = Shape(1, chunk, page_size=16, kv_heads=1, group=2, head_dim=128, dtype="bfloat16")
    case = make_case(shape, [] if chunk else [500], [(497, 3)] if chunk else [])
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(Exception, match=message):
        check_equals_the_oracle(subject, shape, case)

"""The TPU kernels in Pallas' interpreter, held to what every backend is held to.

What would break these, beside what attention_checks names: a copy that nobody waits for, a buffer
that is written while it is read, a stale block in place of one that was not fetched. Blocks of the
real size hold most contexts that an interpreter can run, so most tests make them small.
"""

from dataclasses import replace

import numpy as np
import pytest

from octavo.pallas_kernels import tpu_budget, tpu_work
from octavo.pallas_kernels.tpu_budget import MIN_BLOCK_TOKENS

from .attention_cases import EVERYTHING, Options, Shape, make_case
from .attention_checks import (
    cases,
    check_equals_the_oracle,
    check_free_places_change_no_bit,
    check_nan_poisons_nobody_else,
    check_rows_are_alone,
    check_segments_are_alone,
    named_case,
    some_cases,
)
from .attention_steps import compiled_step, run
from .attention_table import table
from .tpu_subject import TPU, ends, tpu_subject  # noqa: F401 (a fixture)
from .whole_table import whole_table

SMALL_BLOCKS = tpu_subject()
ROWS_FROM_HBM = tpu_subject()


_BASE = Shape(rows=3, chunk=0, page_size=16, kv_heads=2, group=2, head_dim=128, dtype="bfloat16")

# Together: one and several heads to a word, an odd head out, two folds of lanes, odd groups, rows
# beside a chunk, chunks of less than a tile and of no whole number of them, every option.
DECODE_SHAPES = [
    replace(_BASE, page_size=32, kv_heads=4, group=4),
    replace(_BASE, page_size=128, kv_heads=3, group=3, head_dim=64, options=Options(sinks=True)),
    replace(_BASE, kv_heads=1, group=16, head_dim=256, options=Options(window=160)),
]
MIXED_SHAPES = [
    replace(_BASE, chunk=48, group=3, options=EVERYTHING),
    replace(
        _BASE, rows=2, chunk=100, page_size=64, kv_heads=1, head_dim=80, options=Options(window=45)
    ),
    replace(_BASE, chunk=64, kv_heads=3, group=1, head_dim=64, options=Options(softcap=2.0)),
]

by_name = pytest.mark.parametrize("shape", DECODE_SHAPES + MIXED_SHAPES, ids=str)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and blocks so small that the cases cross many of their borders."""
    monkeypatch.setattr(tpu_budget, "TILE_ROWS", 32)
    monkeypatch.setattr(tpu_budget, "MAX_BLOCK_TOKENS", MIN_BLOCK_TOKENS)


@pytest.fixture
def real_blocks(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()


@by_name
def test_equals_the_oracle_and_stores_what_it_should(shape: Shape):
    shapes = DECODE_SHAPES + MIXED_SHAPES
    for case in some_cases(shape, shapes.index(shape), 4):
        check_equals_the_oracle(SMALL_BLOCKS, shape, case)


@pytest.mark.usefixtures("real_blocks")
def test_blocks_of_the_real_size():
    """A context of more than one block, and more of them than buffers."""
    shape = replace(_BASE, chunk=16, page_size=256, kv_heads=4, max_len=4200)
    check_equals_the_oracle(TPU, shape, make_case(shape, [4200, 1025, 1024], [(1500, 13)]))


@pytest.mark.parametrize("shape", [DECODE_SHAPES[2], MIXED_SHAPES[0]], ids=str)
def test_what_free_places_and_padding_hold_changes_no_bit(shape: Shape):
    check_free_places_change_no_bit(SMALL_BLOCKS, shape, [*cases(shape).values()][-2])


@pytest.mark.parametrize("shape", DECODE_SHAPES, ids=str)
def test_a_row_does_not_depend_on_its_neighbours(shape: Shape):
    check_rows_are_alone(SMALL_BLOCKS, shape)


@pytest.mark.parametrize("shape", MIXED_SHAPES[:2], ids=str)
def test_a_segment_does_not_depend_on_its_neighbours(shape: Shape):
    check_segments_are_alone(SMALL_BLOCKS, shape)


@pytest.mark.parametrize("shape", MIXED_SHAPES[:2], ids=str)
def test_a_request_whose_kv_is_nan_poisons_nobody_else(shape: Shape):
    check_nan_poisons_nobody_else(SMALL_BLOCKS, shape)


def _fits_never(rows: int, columns: int) -> bool:
    return False


def test_a_page_table_that_does_not_fit_scalar_memory(monkeypatch: pytest.MonkeyPatch):
    """Its rows are fetched one by one, ahead of their use."""
    monkeypatch.setattr(tpu_work, "table_fits_smem", _fits_never)
    for case in [*cases(MIXED_SHAPES[1]).values()][5:8]:
        check_equals_the_oracle(ROWS_FROM_HBM, MIXED_SHAPES[1], case)


def test_queries_may_be_of_either_type():
    """float32 queries are rounded once, before the kernel."""
    case = make_case(_BASE, [5, 40])
    step = compiled_step(SMALL_BLOCKS, _BASE)
    rounded = case.q.astype(case.k_pages.dtype)
    found, expected = (run(SMALL_BLOCKS, step, replace(case, q=q))[0] for q in (case.q, rounded))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.full
@pytest.mark.usefixtures("real_blocks")
@whole_table("bfloat16")
def test_the_whole_table(shape: Shape, name: str):
    check_equals_the_oracle(TPU, shape, named_case(shape, name))


LONG_CONTEXTS = [s for s in table("bfloat16") if s.max_len > 2 * MIN_BLOCK_TOKENS]


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(LONG_CONTEXTS)))
def test_long_contexts_of_the_table_in_small_blocks(index: int):
    """Two cases of each shape, all of them over the shapes."""
    shape = LONG_CONTEXTS[index]
    for case in some_cases(shape, index, 2):
        check_equals_the_oracle(SMALL_BLOCKS, shape, case)

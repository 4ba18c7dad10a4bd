"""Attention over pages against an oracle that has none: the reference backend."""

import numpy as np
import pytest

from octavo.pallas_kernels.backend import AttentionShape, KVShape

from .attention_cases import EVERYTHING, Options, Shape, make_case
from .attention_checks import (
    TOLERANCE,
    cases,
    check_equals_the_oracle,
    check_free_places_change_no_bit,
    check_nan_poisons_nobody_else,
    check_rows_are_alone,
    check_segments_are_alone,
    compiled,
    named_case,
)
from .attention_steps import REFERENCE, run
from .attention_table import PARAMETERS, combinations, pairs, table
from .whole_table import whole_table

# Each is compiled once, so the list is short; together: rows 1 to 32, groups 1 to 9, 1, 3 and 8 kv
# heads, head_dim 32, 64 and 128, pages of 1 to 256 tokens, chunks of less than a tile, of several,
# and of no whole number of them.
DECODE_SHAPES = [
    Shape(rows=32, chunk=0, page_size=16, kv_heads=3, group=3, head_dim=64),
    Shape(rows=32, chunk=0, page_size=8, kv_heads=1, group=9, head_dim=32, dtype="bfloat16"),
    Shape(rows=9, chunk=0, page_size=1, kv_heads=8, group=1, head_dim=32),
    Shape(rows=2, chunk=0, page_size=256, kv_heads=3, group=2, head_dim=128),
    Shape(rows=1, chunk=0, page_size=128, kv_heads=1, group=1, head_dim=64),
    Shape(rows=9, chunk=0, page_size=16, kv_heads=2, group=2, head_dim=64, options=EVERYTHING),
]
MIXED_SHAPES = [
    Shape(rows=8, chunk=64, page_size=16, kv_heads=3, group=3, head_dim=64),
    Shape(rows=2, chunk=256, page_size=128, kv_heads=8, group=2, head_dim=32),
    Shape(rows=3, chunk=100, page_size=8, kv_heads=1, group=1, head_dim=128),
    Shape(rows=2, chunk=128, page_size=1, kv_heads=1, group=9, head_dim=32, dtype="bfloat16"),
    Shape(rows=2, chunk=16, page_size=256, kv_heads=3, group=1, head_dim=32),
    Shape(
        rows=2,
        chunk=64,
        page_size=16,
        kv_heads=2,
        group=3,
        head_dim=64,
        options=Options(window=100, sinks=True),
    ),
    Shape(rows=2, chunk=64, page_size=16, kv_heads=2, group=3, head_dim=64, options=EVERYTHING),
]

by_name = pytest.mark.parametrize("shape", DECODE_SHAPES + MIXED_SHAPES, ids=str)
mixed_by_name = pytest.mark.parametrize("shape", MIXED_SHAPES, ids=str)


@by_name
def test_equals_the_oracle_and_stores_what_it_should(shape: Shape):
    for case in cases(shape).values():
        check_equals_the_oracle(REFERENCE, shape, case)


@pytest.mark.full
@whole_table("float32")
def test_the_whole_table_in_float32(shape: Shape, name: str):
    check_equals_the_oracle(REFERENCE, shape, named_case(shape, name))


@pytest.mark.full
@whole_table("bfloat16")
def test_the_whole_table_in_bfloat16(shape: Shape, name: str):
    check_equals_the_oracle(REFERENCE, shape, named_case(shape, name))


def test_the_table_has_every_pair():
    names = list(PARAMETERS)
    found = set()
    for values in combinations():
        found |= pairs([list(PARAMETERS[name]).index(values[name]) for name in names])
    sizes = [len(values) for values in PARAMETERS.values()]
    every = sum(a * b for i, a in enumerate(sizes) for b in sizes[i + 1 :])
    assert len(found) == every
    assert len(table("bfloat16")) < 100  # and far from the full product


@by_name
def test_what_free_places_and_padding_hold_changes_no_bit(shape: Shape):
    for case in [*cases(shape).values()][-3:]:
        check_free_places_change_no_bit(REFERENCE, shape, case)


@pytest.mark.parametrize("shape", [s for s in DECODE_SHAPES if s.rows > 1], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(shape: Shape):
    """The loop narrows at other places and sorts it elsewhere; its bits stay."""
    check_rows_are_alone(REFERENCE, shape)


@mixed_by_name
def test_a_segment_does_not_depend_on_its_neighbours(shape: Shape):
    check_segments_are_alone(REFERENCE, shape)


@mixed_by_name
def test_a_request_whose_kv_is_nan_poisons_nobody_else(shape: Shape):
    check_nan_poisons_nobody_else(REFERENCE, shape)


@pytest.mark.parametrize("shape", MIXED_SHAPES[:2], ids=str)
def test_a_chunk_of_one_token_equals_a_decode_row(shape: Shape):
    """The last token of a prompt, computed as a chunk or as a row, agrees to rounding."""
    lens, step = [1, 128, 129, 300][: shape.rows], compiled(REFERENCE, shape)
    rows, *_ = run(REFERENCE, step, make_case(shape, lens))
    for row, kv_len in enumerate(lens):
        # The row's tokens and pages, moved over to the chunk.
        case = make_case(shape, lens)
        first = shape.rows
        for array in (case.q, case.k, case.v):
            array[first] = array[row]
        case.segment_page_table[0] = case.page_table[row]
        case.segment_kv_lens[0], case.segment_q_lens[0] = kv_len, 1
        case.kv_lens[:] = 0
        chunked, *_ = run(REFERENCE, step, case)
        np.testing.assert_allclose(chunked[first], rows[row], atol=TOLERANCE["float32"])


def test_the_reference_runs_everything():
    shape = AttentionShape(
        kv=KVShape(kv_heads=5, head_dim=24, page_size=3, dtype="float32"),
        q_heads=35,
        rows=7,
        chunk=11,
        segments=5,
        pages_per_seq=9,
    )
    assert REFERENCE.backend.refusal(shape) is None
    page = REFERENCE.backend.allocate(shape.kv, 2)
    assert sum(leaf.nbytes for leaf in (page.k, page.v)) == 2 * REFERENCE.backend.bytes_per_page(
        shape.kv
    )

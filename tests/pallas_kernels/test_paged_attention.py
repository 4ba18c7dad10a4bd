"""Attention over pages against an oracle that has none, for every backend the same table of cases.

What would break these: reading a place past a row's length or a page-table entry past its pages,
letting padding write, a border off by one between pages, blocks or tiles, a sum that depends on
what else is in the batch.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from .attention_cases import Case, Shape, bits, compiled_step, make_case, pages_after, run

# Each is compiled once, so the list is short; together: rows 1 to 32, groups 1 to 9, 1, 3 and 8 kv
# heads, head_dim 32, 64 and 128, pages of 1 to 256 tokens, chunks of less than a tile, of several,
# and of no whole number of them.
DECODE_SHAPES = [
    Shape(rows=32, chunk=0, page_size=16, kv_heads=3, group=3, head_dim=64),
    Shape(rows=32, chunk=0, page_size=8, kv_heads=1, group=9, head_dim=32, dtype="bfloat16"),
    Shape(rows=9, chunk=0, page_size=1, kv_heads=8, group=1, head_dim=32),
    Shape(rows=2, chunk=0, page_size=256, kv_heads=3, group=2, head_dim=128),
    Shape(rows=1, chunk=0, page_size=128, kv_heads=1, group=1, head_dim=64),
]
MIXED_SHAPES = [
    Shape(rows=8, chunk=64, page_size=16, kv_heads=3, group=3, head_dim=64),
    Shape(rows=2, chunk=256, page_size=128, kv_heads=8, group=2, head_dim=32),
    Shape(rows=3, chunk=100, page_size=8, kv_heads=1, group=1, head_dim=128),
    Shape(rows=2, chunk=128, page_size=1, kv_heads=1, group=9, head_dim=32, dtype="bfloat16"),
    Shape(rows=2, chunk=16, page_size=256, kv_heads=3, group=1, head_dim=32),
]

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}

by_name = pytest.mark.parametrize("shape", DECODE_SHAPES + MIXED_SHAPES, ids=str)


@cache
def _compiled(shape: Shape) -> Callable[..., Any]:
    return compiled_step(shape)


def _row_lens(shape: Shape) -> dict[str, list[int]]:
    """Lengths of the decode rows, cut or repeated to the shape's number of rows."""
    page, longest = shape.page_size, shape.max_len
    rng = np.random.default_rng(shape.rows)

    def fit(lens: list[int]) -> list[int]:
        lens = [min(n, longest) for n in lens]
        return (lens * shape.rows)[: shape.rows]

    return {
        "none": [],
        "ones": fit([1]),
        "page borders": fit([page, page + 1, max(page - 1, 1), 2 * page, 2 * page + 1]),
        "block borders": fit([128, 129, 127, 256, 257, 255, 384, 1]),
        "one long": fit([longest] + [3] * (shape.rows - 1)),
        "long ones last": [*fit([2, 0, 5, 130])[1:], longest],
        "random": rng.integers(0, longest + 1, shape.rows).tolist(),
    }


def _segments(shape: Shape) -> dict[str, list[tuple[int, int]]]:
    """(tokens before, tokens of the chunk) of each segment, for a chunk of the shape's size."""
    chunk, page = shape.chunk, shape.page_size
    return {
        "no segment": [],
        "one from the start": [(0, chunk)],
        "one that is not full": [(0, chunk - 3)],
        "one token": [(0, 1)],
        "one token after a prefix": [(page, 1)],
        "a prefix continued": [(130, chunk // 2), (page - 1, chunk // 4)],
        "around a block": [(127, 2), (128, 1), (126, 1), (126, 2)],
        "many short": [(i * 30, 1 + i % 2) for i in range(8)],
        "one unused between": [(5, 3), (0, 0), (64, 4), (0, 0), (0, 5)],
        "eight that fill it": [(i * 17, chunk // 8) for i in range(8)],
    }


def _cases(shape: Shape) -> dict[str, Case]:
    row_lens = _row_lens(shape)
    if not shape.chunk:
        return {name: make_case(shape, lens) for name, lens in row_lens.items()}
    mixed = list(row_lens.items())
    return {
        f"{name}, rows {mixed[i % len(mixed)][0]}": make_case(
            shape, mixed[i % len(mixed)][1], segments, seed=i
        )
        for i, (name, segments) in enumerate(_segments(shape).items())
    }


@by_name
def test_equals_the_oracle_and_stores_what_it_should(shape: Shape):
    """NaN lies in every place that no request has written, and in every padded token."""
    for name, case in _cases(shape).items():
        attended, *pages = run(_compiled(shape), case)
        error = np.abs(attended - case.expected).max()
        assert error < TOLERANCE[shape.dtype], name
        padding = [place is None for place in case.places]
        assert not attended[padding].any(), f"{name}: padding attends to something"
        for found, expected in zip(pages, pages_after(case), strict=True):
            # Page 0 still zero, the last page untouched, no padded token anywhere.
            np.testing.assert_array_equal(bits(found), bits(expected), name)


@by_name
def test_what_free_places_and_padding_hold_changes_no_bit(shape: Shape):
    cases = _cases(shape)
    for name in [*cases][-3:]:
        outputs = [
            run(_compiled(shape), cases[name].with_free_places(value))[0]
            for value in (np.nan, np.inf, 1e4, 1e30, 0.0)
        ]
        for output in outputs[1:]:
            np.testing.assert_array_equal(bits(output), bits(outputs[0]), name)


@pytest.mark.parametrize("shape", [s for s in DECODE_SHAPES if s.rows > 1], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(shape: Shape):
    """The loop narrows at other places and sorts it elsewhere; its bits stay."""
    row_lens = _row_lens(shape)["random"]
    together, *_ = run(_compiled(shape), make_case(shape, row_lens))
    for row in {0, shape.rows // 2, shape.rows - 1}:
        for others in (0, 1, shape.max_len):
            changed = [others] * shape.rows
            changed[row] = row_lens[row]
            alone, *_ = run(_compiled(shape), make_case(shape, changed))
            np.testing.assert_array_equal(bits(alone[row]), bits(together[row]))


@pytest.mark.parametrize("shape", MIXED_SHAPES, ids=str)
def test_a_segment_does_not_depend_on_its_neighbours(shape: Shape):
    """The same request in the same executable: alone or among others, at any place of the chunk."""
    length = shape.chunk // 4
    segment = (140, length)

    def attended(before: list[tuple[int, int]], after: list[tuple[int, int]], rows: list[int]):
        # A segment's data follows its index, so it is always the fourth; unused ones fill up.
        leading = [*before, *[(0, 0)] * (3 - len(before))]
        case = make_case(shape, rows, [*leading, segment, *after])
        first = shape.rows + sum(count for _, count in before)
        return run(_compiled(shape), case)[0][first : first + length]

    alone = attended([], [], [])
    neighbours: list[tuple[list[tuple[int, int]], list[tuple[int, int]], int]] = [
        ([], [(0, length), (300, 2)], 1),
        ([(7, 1)], [], shape.max_len),
        ([(0, length), (200, 1), (3, length)], [(1, 1)], 5),
    ]
    for before, after, row_len in neighbours:
        rows = [row_len] * shape.rows
        np.testing.assert_array_equal(bits(attended(before, after, rows)), bits(alone))


@pytest.mark.parametrize("shape", MIXED_SHAPES, ids=str)
def test_a_request_whose_kv_is_nan_poisons_nobody_else(shape: Shape):
    """Rows and segments beside it keep every bit, in the same tile too."""
    length = shape.chunk // 4
    segments = [(7, length), (140, length), (0, length)]
    lens = [5, 130, 1, 300][: shape.rows]
    before, *_ = run(_compiled(shape), make_case(shape, lens, segments))
    sick = make_case(shape, lens, segments)
    first = shape.rows + length
    sick.k[first : first + length] = np.nan
    sick.v[first : first + length] = np.nan
    sick.k[0] = sick.v[0] = np.nan  # and a row
    after, *_ = run(_compiled(shape), sick)
    healthy = [*range(1, first), *range(first + length, first + 2 * length)]
    np.testing.assert_array_equal(bits(after[healthy]), bits(before[healthy]))
    assert np.isnan(after[0]).any()
    assert np.isnan(after[first]).any()


@pytest.mark.parametrize("shape", MIXED_SHAPES[:2], ids=str)
def test_a_chunk_of_one_token_equals_a_decode_row(shape: Shape):
    """The last token of a prompt, computed as a chunk or as a row, agrees to rounding."""
    lens = [1, 128, 129, 300][: shape.rows]
    rows, *_ = run(_compiled(shape), make_case(shape, lens))
    for row, kv_len in enumerate(lens):
        # The row's tokens and pages, moved over to the chunk.
        case = make_case(shape, lens)
        first = shape.rows
        for array in (case.q, case.k, case.v):
            array[first] = array[row]
        case.segment_page_table[0] = case.page_table[row]
        case.segment_kv_lens[0], case.segment_q_lens[0] = kv_len, 1
        case.kv_lens[:] = 0
        chunked, *_ = run(_compiled(shape), case)
        np.testing.assert_allclose(chunked[first], rows[row], atol=TOLERANCE["float32"])

"""What every backend is held to, for one shape. Each backend's tests call these with their own.

What would break them: reading a place past a row's length or a page-table entry past its pages,
letting padding write, a border off by one between pages, blocks or tiles, a window or a sink that
is forgotten, a sum that depends on what else is in the batch.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .attention_cases import Case, Shape, bits, make_case, pages_after
from .attention_steps import Subject, compiled_step, run

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


@cache
def compiled(subject: Subject, shape: Shape) -> Callable[..., Any]:
    """The step, compiled once for each shape."""
    return compiled_step(subject, shape)


def row_lens(shape: Shape) -> dict[str, list[int]]:
    """Lengths of the decode rows: repeated where rows are many, over more cases where few."""
    page, longest = shape.page_size, shape.max_len
    rng = np.random.default_rng(shape.rows)

    def fit(lens: list[int]) -> list[int]:
        lens = [min(n, longest) for n in lens]
        return (lens * shape.rows)[: shape.rows]

    lists = {
        "none": [],
        "ones": fit([1]),
        "one long": fit([longest] + [3] * (shape.rows - 1)),
        "long ones last": [*fit([2, 0, 5, 130])[1:], longest],
        "random": rng.integers(0, longest + 1, shape.rows).tolist(),
    }
    borders = {
        "page borders": [page, page + 1, max(page - 1, 1), 2 * page, 2 * page + 1],
        "block borders": [128, 129, 127, 256, 257, 255, 384, 385],
    }
    for name, lens in borders.items():
        for first in range(0, len(lens), shape.rows):
            share = lens[first : first + shape.rows]
            lists[name if share == lens else f"{name} {share}"] = fit(share)
    return lists


def segments(shape: Shape) -> dict[str, list[tuple[int, int]]]:
    """(tokens before, tokens of the chunk) of each segment, for a chunk of the shape's size."""
    chunk, page, longest = shape.chunk, shape.page_size, shape.max_len
    lists: dict[str, list[tuple[int, int]]] = {
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
    return {
        name: [(min(before, longest - count), count) for before, count in runs]
        for name, runs in lists.items()
    }


def _case_data(shape: Shape) -> dict[str, tuple[list[int], list[tuple[int, int]], int]]:
    """Rows' lengths, segments and seed of every case of a shape, by what is special about it."""
    lens = row_lens(shape)
    if not shape.chunk:
        return {name: (rows, [], 0) for name, rows in lens.items()}
    mixed, chunks = list(lens.items()), list(segments(shape).items())
    found: dict[str, tuple[list[int], list[tuple[int, int]], int]] = {}
    for i in range(max(len(mixed), len(chunks))):
        (rows_name, rows), (name, runs) = mixed[i % len(mixed)], chunks[i % len(chunks)]
        found[f"{name}, rows {rows_name}"] = (rows, runs, i)
    return found


def case_names(shape: Shape) -> list[str]:
    """Of every case of a shape, none of which is made."""
    return list(_case_data(shape))


def named_case(shape: Shape, name: str) -> Case:
    """The case of that name."""
    return make_case(shape, *_case_data(shape)[name])


def cases(shape: Shape) -> dict[str, Case]:
    """Every case of a shape."""
    return {name: named_case(shape, name) for name in case_names(shape)}


def some_cases(shape: Shape, start: int, count: int) -> list[Case]:
    """A few of a shape's cases, others for each start, all of them over many shapes."""
    names = case_names(shape)
    picked = [names[(start + i * len(names) // count) % len(names)] for i in range(count)]
    return [named_case(shape, name) for name in picked]


def check_equals_the_oracle(subject: Subject, shape: Shape, case: Case) -> None:
    """NaN lies in every place that no request has written, and in every padded token."""
    attended, *pages = run(subject, compiled(subject, shape), case)
    assert np.isfinite(attended).all(), "what nobody wrote was read"
    size = np.maximum(1.0, np.abs(case.expected))
    error = (np.abs(attended - case.expected) / size).max()
    assert error < TOLERANCE[shape.dtype], f"off by {error:.3g} from the oracle"
    padding = [place is None for place in case.places]
    assert not attended[padding].any(), "padding attends to something"
    for found, expected in zip(pages, pages_after(case), strict=True):
        # Page 0 still zero, the last page untouched, no padded token anywhere.
        np.testing.assert_array_equal(bits(found), bits(expected))


def check_free_places_change_no_bit(subject: Subject, shape: Shape, case: Case) -> None:
    """Whatever padding and places that nobody wrote hold."""
    step = compiled(subject, shape)
    expected = run(subject, step, case)[0]
    for value in (np.inf, 1e4, 1e30, 0.0):
        found = run(subject, step, case.with_free_places(value))[0]
        np.testing.assert_array_equal(bits(found), bits(expected))


def check_rows_are_alone(subject: Subject, shape: Shape) -> None:
    """A row has the same bits whatever its neighbours' lengths."""
    step = compiled(subject, shape)
    lens = row_lens(shape)["random"]
    together, *_ = run(subject, step, make_case(shape, lens))
    for row in {0, shape.rows // 2, shape.rows - 1}:
        for others in (0, 1, shape.max_len):
            changed = [others] * shape.rows
            changed[row] = lens[row]
            alone, *_ = run(subject, step, make_case(shape, changed))
            np.testing.assert_array_equal(bits(alone[row]), bits(together[row]))


def check_segments_are_alone(subject: Subject, shape: Shape) -> None:
    """A segment has the same bits wherever it stands in the chunk and whatever is beside it."""
    length = shape.chunk // 4
    segment = (140 if shape.max_len > 200 else 20, length)
    step = compiled(subject, shape)

    def attended(before: list[tuple[int, int]], after: list[tuple[int, int]], rows: list[int]):
        # A segment's data follows its index, so it is always the fourth; unused ones fill up.
        leading = [*before, *[(0, 0)] * (3 - len(before))]
        case = make_case(shape, rows, [*leading, segment, *after])
        first = shape.rows + sum(count for _, count in before)
        return run(subject, step, case)[0][first : first + length]

    alone = attended([], [], [])
    far = shape.max_len - length
    neighbours: list[tuple[list[tuple[int, int]], list[tuple[int, int]], int]] = [
        ([], [(0, length), (far, 2)], 1),
        ([(7, 1)], [], shape.max_len),
        ([(0, length), (far, 1), (3, length)], [(1, 1)], 5),
    ]
    for before, after, row_len in neighbours:
        rows = [row_len] * shape.rows
        np.testing.assert_array_equal(bits(attended(before, after, rows)), bits(alone))


def check_nan_poisons_nobody_else(subject: Subject, shape: Shape) -> None:
    """Rows and segments beside a request whose KV is NaN keep every bit, in the same tile too."""
    step, length = compiled(subject, shape), shape.chunk // 4
    runs = [(7, length), (140 if shape.max_len > 200 else 20, length), (0, length)]
    lens = [min(n, shape.max_len) for n in (5, 130, 1, 300)][: shape.rows]
    before, *_ = run(subject, step, make_case(shape, lens, runs))
    sick = make_case(shape, lens, runs)
    first = shape.rows + length
    sick.k[first : first + length] = np.nan
    sick.v[first : first + length] = np.nan
    sick.k[0] = sick.v[0] = np.nan  # and a row
    after, *_ = run(subject, step, sick)
    healthy = [*range(1, first), *range(first + length, first + 2 * length)]
    np.testing.assert_array_equal(bits(after[healthy]), bits(before[healthy]))
    assert np.isnan(after[0]).any()
    assert np.isnan(after[first]).any()

"""Measures what steps cost by running them before the engine is ready, which warms them up as well.

Nobody holds a slot or a page yet, so the steps run on real pages of made-up requests and leave
garbage there: nothing past a request's length is ever read. Page 0 stays zero, and no two rows of a
step write the same place.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from . import packing
from .executor import DeviceExecutor
from .made_up_requests import Occupant, blank, enter, vacate
from .packing import UploadLayout
from .page_transfer import PAGES_PER_TRANSFER
from .step_costs import StepCosts, chunk_kv_tokens
from .step_shapes import StepKey

# A step runs until one of these is reached; the shortest run counts, because whatever disturbs a
# run makes it longer.
MOST_RUNS = 3
ENOUGH_S = 0.1

# How long a long context is, as far as the pool goes: so long that it shows, and no longer.
DECODE_CONTEXT_TOKENS = 2048
CHUNK_CONTEXT_TOKENS = 512  # every token of the chunk reads them
MOST_CONTEXT_PAGES = 128  # they are entered over several steps

IMPORT_CALLS = 4
SHORTEST_S = 1e-9  # a step costs something, whatever a coarse clock says


def measure_costs(
    executor: DeviceExecutor,
    layouts: Sequence[UploadLayout],
    *,
    num_pages: int,
    pages_per_seq: int,
    clock: Callable[[], float],
) -> StepCosts:
    """Runs every executable a few times; afterwards no slot is active.

    All rows are greedy: what sampling adds is not measured.

    Args:
      executor: Fresh: no slot is active, no page on the host.
      layouts: One per step that was compiled.
      num_pages: Pages of the pool, page 0 included.
      pages_per_seq: Columns of the page table.
      clock: Seconds.
    """
    bench = _Bench(executor, layouts, num_pages=num_pages, pages_per_seq=pages_per_seq, clock=clock)
    short = bench.short_contexts()
    decode_kv_token_s = bench.decode_kv_token_s(short)
    chunk_kv_token_s = bench.chunk_kv_token_s(short)
    bench.vacate()
    import_s, import_page_s = 0.0, 0.0
    if executor.can_keep_pages:
        import_s, import_page_s = _import_costs(executor, num_pages, clock)

    def base_s(run: "_Run", key: StepKey) -> float:
        # A chunk reads its own tokens even where nothing is before it. Half is kept at least: what
        # a small pool lets us measure of the context may be noise.
        context_s = chunk_kv_tokens(0, run.length) * chunk_kv_token_s
        return max(run.seconds - context_s, run.seconds / 2)

    return StepCosts(
        base_s={key: base_s(run, key) for key, run in short.items()},
        decode_kv_token_s=decode_kv_token_s,
        chunk_kv_token_s=chunk_kv_token_s,
        import_page_s=import_page_s,
        import_s=import_s,
    )


class _Run(NamedTuple):
    """A measured step.

    Attributes:
      seconds: The shortest of its runs.
      length: Tokens that its chunk held.
    """

    seconds: float
    length: int


class _Bench:
    """Fills slots with made-up requests and times steps. Prompts are in the last slot."""

    def __init__(
        self,
        executor: DeviceExecutor,
        layouts: Sequence[UploadLayout],
        *,
        num_pages: int,
        pages_per_seq: int,
        clock: Callable[[], float],
    ) -> None:
        """Takes what measure_costs takes."""
        self._executor = executor
        self._layouts = layouts
        self._num_slots = layouts[0].num_slots
        self._page_size = layouts[0].page_size
        self._usable = num_pages - 1
        self._most_columns = min(pages_per_seq, self._usable)  # of one request
        self._clock = clock
        # Slot rows travel in mixed steps alone. This one is the shortest.
        mixed = [layout for layout in layouts if layout.key.chunk]
        self._carrier = min(mixed, key=lambda layout: (layout.key.chunk, layout.key.rows))

    def short_contexts(self) -> dict[StepKey, _Run]:
        """Every executable as full as it gets, with next to no context."""
        longest_chunk = max(layout.key.chunk for layout in self._layouts)
        chunk_columns = min(self._pages(longest_chunk), self._most_columns)
        # A row moves on by a token each time it runs.
        most_runs = (1 + MOST_RUNS) * len(self._layouts)
        row_columns = min(self._pages(most_runs), self._most_columns)
        most_rows = max(layout.key.rows for layout in self._layouts)
        num_rows = min(
            most_rows, self._num_slots - 1, (self._usable - chunk_columns) // row_columns
        )
        remaining = row_columns * self._page_size
        self._enter(
            [Occupant(slot=slot, remaining=remaining) for slot in range(num_rows)],
            {**dict.fromkeys(range(num_rows), row_columns), self._num_slots - 1: chunk_columns},
        )
        room = chunk_columns * self._page_size
        runs: dict[StepKey, _Run] = {}
        for layout in self._layouts:
            length = min(layout.key.chunk, room)
            step = self._step(layout, num_rows=min(num_rows, layout.key.rows), length=length)
            step()  # the first run touches memory and code that no later one has to
            runs[layout.key] = _Run(_shortest_s(step, self._clock), length)
        return runs

    def decode_kv_token_s(self, short: Mapping[StepKey, _Run]) -> float:
        """What a decode row's context costs, per token; 0 where the pool holds no long one."""
        decode = [layout for layout in self._layouts if not layout.key.chunk] or self._layouts
        layout = min(decode, key=lambda layout: layout.key.rows)
        num_rows = min(layout.key.rows, self._num_slots, self._usable)
        columns = min(
            self._pages(DECODE_CONTEXT_TOKENS),
            MOST_CONTEXT_PAGES,
            self._most_columns,
            self._usable // num_rows,
        )
        kv_len = columns * self._page_size - MOST_RUNS
        if kv_len <= 0:
            return 0.0
        self._enter(
            [Occupant(slot=slot, kv_len=kv_len, remaining=MOST_RUNS) for slot in range(num_rows)],
            dict.fromkeys(range(num_rows), columns),
        )
        long_s = _shortest_s(self._step(layout, num_rows=num_rows), self._clock)
        return max(long_s - short[layout.key].seconds, 0.0) / (num_rows * kv_len)

    def chunk_kv_token_s(self, short: Mapping[StepKey, _Run]) -> float:
        """What the context of a chunk's token costs, per token; 0 where the pool holds no long one.

        From the executable that StepCosts.prefill_s counts with.
        """
        layout = max(self._layouts, key=lambda layout: (layout.key.chunk, -layout.key.rows))
        length = short[layout.key].length
        context_columns = min(self._pages(CHUNK_CONTEXT_TOKENS), MOST_CONTEXT_PAGES)
        columns = min(context_columns + self._pages(length), self._most_columns)
        start = columns * self._page_size - length
        if start <= 0:
            return 0.0
        self._enter([], {self._num_slots - 1: columns})
        long_s = _shortest_s(self._step(layout, start=start, length=length), self._clock)
        return max(long_s - short[layout.key].seconds, 0.0) / (start * length)

    def vacate(self) -> None:
        """Leaves every slot inactive."""
        vacate(self._executor, self._carrier)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _enter(self, occupants: Iterable[Occupant], columns: Mapping[int, int]) -> None:
        """Puts requests into slots and gives slots that many pages each, from page 1 on."""
        page = count(1)
        pages = {slot: [next(page) for _ in range(most)] for slot, most in columns.items()}
        enter(self._executor, self._carrier, occupants, pages)

    def _step(
        self, layout: UploadLayout, *, num_rows: int = 0, start: int = 0, length: int = 0
    ) -> Callable[[], None]:
        """A step to run, as often as one likes.

        Args:
          layout: Its executable.
          num_rows: The first so many slots decode.
          start: Tokens of the prompt before the chunk.
          length: Tokens of the chunk; it does not end the prompt.
        """
        packed, parts = blank(layout)
        parts["decode_slots"][:num_rows] = range(num_rows)
        if length:
            segment = parts["segments"][0]
            segment[packing.SEGMENT_SLOT] = self._num_slots - 1
            segment[packing.SEGMENT_START] = start
            segment[packing.SEGMENT_LENGTH] = length

        def step() -> None:
            self._executor.fetch(self._executor.dispatch(layout.key, packed))

        return step


def _import_costs(
    executor: DeviceExecutor, num_pages: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """What it costs to bring any pages back from the host, and what each of them adds."""
    pages = range(1, min(PAGES_PER_TRANSFER + 1, num_pages))
    handle = count(-1, -1)  # the engine's begin at 0

    def imports_s(num_calls: int) -> float:
        shortest_s = math.inf
        for _ in range(MOST_RUNS):
            calls = [[(next(handle), page) for page in pages] for _ in range(num_calls)]
            for call in calls:
                executor.export_pages([(page, handle) for handle, page in call])
            executor.wait()
            started_s = clock()
            for call in calls:
                executor.import_pages(call)
            executor.wait()
            shortest_s = min(shortest_s, clock() - started_s)
        return shortest_s

    one_s, several_s = imports_s(1), imports_s(IMPORT_CALLS)
    page_s = max(several_s - one_s, 0.0) / ((IMPORT_CALLS - 1) * len(pages))
    return max(one_s - len(pages) * page_s, 0.0), page_s


def _shortest_s(step: Callable[[], None], clock: Callable[[], float]) -> float:
    shortest_s, spent_s = math.inf, 0.0
    for _ in range(MOST_RUNS):
        started_s = clock()
        step()
        seconds = clock() - started_s
        shortest_s, spent_s = min(shortest_s, seconds), spent_s + seconds
        if spent_s >= ENOUGH_S:
            break
    return max(shortest_s, SHORTEST_S)

"""Which step shapes exist: the closed set of executables, and the one way to look one up. No JAX.

A step runs `rows` decode rows and `chunk` prompt tokens (chunk 0: a decode step). Both come from
short lists, so that everything that will ever run is compiled before READY.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..configs.engine_config import EngineConfig

MAX_SEGMENTS = 8
HIT_PAGE_ENTRIES = 128
"""Page-table entries of cached pages that one step takes up; a longer prefix takes more steps."""
RULE_ENTRIES = 256
"""Ids whose counts or biases one step takes up; a longer history takes more steps."""

SMALL_CHUNK = 16
SMALLEST_ROWS = 2  # one row takes ten times as long as two: the CPU multiplies it in a scalar loop


@dataclass(frozen=True, order=True)
class StepKey:
    """Names one executable.

    Attributes:
      rows: Decode rows.
      chunk: Prompt tokens; 0 names a decode step.
    """

    rows: int
    chunk: int

    @property
    def segments(self) -> int:
        """Most requests whose prompt tokens share the chunk."""
        return min(MAX_SEGMENTS, self.chunk)

    @property
    def samples(self) -> int:
        """Tokens that the step can sample: one a decode row, one a segment."""
        return self.rows + self.segments


def smallest_at_least(buckets: Sequence[int], value: int) -> int:
    """The smallest bucket that holds `value`; raises ValueError if none does."""
    for bucket in buckets:
        if bucket >= value:
            return bucket
    raise ValueError(f"{value} exceeds the largest bucket of {list(buckets)}")


@dataclass(frozen=True)
class StepShapes:
    """The shapes of one engine.

    Attributes:
      decode_rows: Rows of decode steps, ascending. None: mixed steps run what only decodes, too.
      mixed: Mixed steps, the cheapest first: a row and a prompt token cost alike.
    """

    decode_rows: tuple[int, ...]
    mixed: tuple[StepKey, ...]

    @staticmethod
    def from_config(config: EngineConfig) -> "StepShapes":
        """Shapes that cover every batch up to max_num_seqs rows and prefill_chunk_tokens.

        Decode steps are most of the work, so their buckets are close: a batch of 9 pays for 16
        rows. In a mixed step the chunk costs more than the rows, so two buckets of rows do; but
        where chunks are small, so that streams keep their pace beside a long prompt, rows that
        nobody needs are what a step takes longer, and half a batch has its own small chunks.
        Example: 32 rows and chunks of 256 give decode rows 2, 8, 16, 32; mixed steps of 2 and 32
        rows with chunks of 16, 64, 256, and of 16 rows with 8, 16, 64: thirteen executables.

        A deterministic engine has one: in another the compiler may sum in another order.
        """
        rows = max(SMALLEST_ROWS, config.max_num_seqs)
        chunk = max(SMALLEST_ROWS, config.prefill_chunk_tokens)
        if config.deterministic:
            return StepShapes(decode_rows=(), mixed=(StepKey(rows, chunk),))
        chunks = _buckets(chunk, SMALL_CHUNK, lambda n: n // 4)
        keys = {
            StepKey(bucket, each)
            for bucket in _buckets(rows, SMALLEST_ROWS, lambda n: n // 16)
            for each in chunks
        }
        if rows >= 2 * SMALL_CHUNK and chunk > SMALL_CHUNK:
            keys |= {StepKey(rows // 2, each) for each in (SMALL_CHUNK // 2, *chunks[:-1])}
        return StepShapes(
            decode_rows=_buckets(rows, SMALLEST_ROWS, lambda n: n // 2 if n > 8 else n // 4),
            mixed=tuple(sorted(keys, key=lambda key: (key.rows + key.chunk, key))),
        )

    @property
    def chunks(self) -> tuple[int, ...]:
        """Sizes of chunks, ascending; not every one with any number of rows."""
        return tuple(sorted({key.chunk for key in self.mixed}))

    @property
    def max_segments(self) -> int:
        """Most requests that a step can insert or take prompt tokens of."""
        return max(key.segments for key in self.mixed)

    def all_keys(self) -> list[StepKey]:
        """Every executable, largest first: the costliest compile starts first."""
        decode = [StepKey(rows, 0) for rows in self.decode_rows]
        keys = [*self.mixed, *decode]
        return sorted(keys, key=lambda key: (key.rows + key.chunk, key), reverse=True)

    def key_for(self, num_rows: int, num_chunk_tokens: int) -> StepKey:
        """The cheapest executable that runs this many decode rows and prompt tokens.

        Raises:
          ValueError: It is more than the largest runs.
        """
        if num_chunk_tokens == 0 and self.decode_rows:
            return StepKey(smallest_at_least(self.decode_rows, num_rows), 0)
        for key in self.mixed:
            if key.rows >= num_rows and key.chunk >= num_chunk_tokens:
                return key
        raise ValueError(
            f"{num_rows} rows and {num_chunk_tokens} prompt tokens exceed the largest step, "
            f"{self.mixed[-1]}"
        )


def _buckets(most: int, smallest: int, shrink: Callable[[int], int]) -> tuple[int, ...]:
    """Ascending buckets that end in `most`, each shrunk from the next, down to `smallest`."""
    buckets = [most]
    while buckets[-1] > smallest:
        buckets.append(max(smallest, shrink(buckets[-1])))
    return tuple(reversed(buckets))

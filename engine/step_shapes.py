"""Which step shapes exist: the closed set of executables, and the one way to look one up. No JAX.

A step runs `rows` decode rows and `chunk` prompt tokens (chunk 0: a decode step). Both come from
short lists, so that everything that will ever run is compiled before READY.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..configs.engine_config import EngineConfig

MAX_SEGMENTS = 8


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
    """The buckets of one engine, ascending. Decode steps and mixed steps have their own rows.

    One row costs ten times two (a one-row matmul runs as a scalar loop on the CPU), so no bucket
    is smaller than 2.
    """

    decode_rows: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    chunks: tuple[int, ...]

    @staticmethod
    def from_config(config: EngineConfig) -> "StepShapes":
        """Buckets that cover every batch up to max_num_seqs rows and prefill_chunk_tokens."""
        most_rows = max(2, config.max_num_seqs)
        most_chunk = max(2, config.prefill_chunk_tokens)
        return StepShapes(
            decode_rows=_up_to(most_rows, start=2, factor=2, count=5),
            mixed_rows=_up_to(most_rows, start=2, factor=4, count=3),
            chunks=_up_to(most_chunk, start=2, factor=4, count=3),
        )

    def keys(self) -> list[StepKey]:
        """Every executable, largest first: the costliest compile starts first."""
        mixed = [StepKey(rows, chunk) for rows in self.mixed_rows for chunk in self.chunks]
        decode = [StepKey(rows, 0) for rows in self.decode_rows]
        return sorted(mixed + decode, key=lambda key: (key.rows + key.chunk, key), reverse=True)

    def key_for(self, num_rows: int, num_chunk_tokens: int) -> StepKey:
        """The smallest executable that runs this many decode rows and prompt tokens."""
        if num_chunk_tokens == 0:
            return StepKey(smallest_at_least(self.decode_rows, num_rows), 0)
        return StepKey(
            smallest_at_least(self.mixed_rows, num_rows),
            smallest_at_least(self.chunks, num_chunk_tokens),
        )


def _up_to(most: int, *, start: int, factor: int, count: int) -> tuple[int, ...]:
    """At most `count` buckets ending in `most`, each at most `factor` below the next.

    Example: most 32, factor 2, count 5 gives (2, 4, 8, 16, 32); most 100 (6, 12, 25, 50, 100).
    """
    buckets = [most]
    while len(buckets) < count and buckets[-1] > start:
        buckets.append(max(start, buckets[-1] // factor))
    return tuple(reversed(buckets))

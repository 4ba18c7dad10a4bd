"""The last wall against too many calls: a count of our own, that refuses and never queues.

grpc.aio's maximum_concurrent_rpcs is not enough: it has queued instead of refusing, and its count
has underflowed (https://github.com/grpc/grpc/issues/30424, /issues/41531).
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager

import grpc

from ..engine.drain_rate import DrainRate
from .status import Refusal

MIN_RETRY_S = 0.1  # sooner is a busy loop
MAX_RETRY_S = 60.0  # a longer wait is no forecast
START_PER_S = 1.0  # a guess, until calls were seen to leave
NEARLY_FULL = 0.75  # of the limit; several calls may leave at once, and all tell of the pace


class ConcurrencyGate:
    """Counts the calls inside; used from the event loop alone.

    Who is refused is told to come when a place will be free, behind those who were told before. No
    place is kept: that is for engine.admission_ledger, which refuses long before.

    Attributes:
      limit: Most calls inside at once.
      num_inside: Calls inside now.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        """A gate that nobody has passed yet; the clock's unit is a second."""
        self.limit = limit
        self.num_inside = 0
        self._clock = clock
        self._pace = DrainRate(START_PER_S)  # calls that leave while it is nearly full
        self._seen_s = clock()
        self._told_s = -math.inf  # when there was room for all who were refused so far

    @contextmanager
    def enter(self) -> Generator[None]:
        """Holds a place while inside; raises Refusal at once when there is none."""
        self._watch(num_leaving=0)
        if self.num_inside >= self.limit:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_CALLS",
                f"{self.num_inside} calls are open; the limit is {self.limit}",
                retry_after_s=self._retry_after_s(),
            )
        self.num_inside += 1
        try:
            yield
        finally:
            self._watch(num_leaving=1)
            self.num_inside -= 1

    def _watch(self, num_leaving: int) -> None:
        """Learns the pace from the time since it last looked, and from calls that leave now."""
        now_s = self._clock()
        if self.num_inside > NEARLY_FULL * self.limit:
            self._pace.watch(now_s - self._seen_s)
            self._pace.count(num_leaving)
        else:
            self._told_s = now_s  # there is room for all who were told to come later
        self._seen_s = now_s

    def _retry_after_s(self) -> float:
        """When the next place is free that nobody was told of."""
        now_s = self._seen_s
        free_s = max(self._told_s, now_s) + 1 / self._pace.per_s
        self._told_s = min(free_s, now_s + MAX_RETRY_S)
        return max(self._told_s - now_s, MIN_RETRY_S)

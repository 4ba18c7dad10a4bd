"""The last wall against too many calls: a count of our own, that refuses and never queues.

grpc.aio's maximum_concurrent_rpcs is not enough: it has queued instead of refusing, and its count
has underflowed (https://github.com/grpc/grpc/issues/30424, /issues/41531).
"""

from collections.abc import Generator
from contextlib import contextmanager

import grpc

from .status import Refusal


class ConcurrencyGate:
    """Counts the calls inside; used from the event loop alone.

    Attributes:
      limit: Most calls inside at once.
      num_inside: Calls inside now.
    """

    def __init__(self, limit: int) -> None:
        """A gate that nobody has passed yet."""
        self.limit = limit
        self.num_inside = 0

    @contextmanager
    def enter(self) -> Generator[None]:
        """Holds a place while inside; raises Refusal at once when there is none."""
        if self.num_inside >= self.limit:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_CALLS",
                f"{self.num_inside} calls are open; the limit is {self.limit}",
            )
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1

"""First come, first served. No JAX."""

from collections.abc import Iterator, Sequence

from .keyed_queue import KeyedQueue
from .schedule import Rank, RequestState


class FcfsQueue:
    """In the order in which the engine took the requests; also the base of the other policies.

    A preempted request came before all that still wait, so it is first.
    """

    keeps_count = False

    def __init__(self) -> None:
        """Nobody waits."""
        self._queue = KeyedQueue(self.rank)

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def __iter__(self) -> Iterator[RequestState]:
        """All of them."""
        return iter(self._queue)

    def push(self, state: RequestState) -> None:
        """A request waits."""
        self._queue.push(state)

    def remove(self, state: RequestState) -> None:
        """It waits no more."""
        self._queue.remove(state)

    def first(self, now_s: float) -> RequestState | None:
        """Who is next."""
        return self._queue.first()

    def rank(self, state: RequestState) -> Rank:
        """Its place in the order of arrival."""
        return (state.ordinal,)

    def urgency(self, state: RequestState) -> Rank:
        """As those that run are ordered."""
        return self.rank(state)

    def gives_way(
        self, newcomer: RequestState, running: Sequence[RequestState]
    ) -> list[RequestState]:
        """Nobody: whoever waits came later."""
        return []

    def charge(self, state: RequestState, num_tokens: int) -> None:
        """Nobody keeps count."""

    def depart(self, state: RequestState) -> None:
        """Nobody keeps count."""

    def block(self, tenant: str) -> None:
        """A tenant has as many slots as it may have."""
        self._queue.block(tenant)

    def unblock(self, tenant: str) -> None:
        """It has fewer again."""
        self._queue.unblock(tenant)

"""KeyedQueue: waiting requests in the order of a key that never changes. No JAX."""

import heapq
from collections.abc import Callable, Iterable, Iterator

from .schedule import Rank, RequestState

MAX_STALE_ENTRIES = 64  # beyond one for each request that waits


class KeyedQueue:
    """A priority queue that gives up any request at once, and passes over blocked tenants."""

    def __init__(self, key: Callable[[RequestState], Rank]) -> None:
        """An empty queue; the lowest key is first, and of two equal ones the earlier request."""
        self._key = key
        self._waiting: dict[int, RequestState] = {}  # by ordinal
        # Entries whose request waits no more are skipped.
        self._heap: list[tuple[Rank, int]] = []
        self._blocked: dict[str, list[tuple[Rank, int]]] = {}  # what was passed over, by tenant

    def __len__(self) -> int:
        """Requests that wait, those of blocked tenants included."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestState]:
        """All of them, in no particular order."""
        return iter(self._waiting.values())

    def push(self, state: RequestState) -> None:
        """Enters a request."""
        self._waiting[state.ordinal] = state
        heapq.heappush(self._heap, (self._key(state), state.ordinal))

    def remove(self, state: RequestState) -> None:
        """Takes a request out, wherever it is."""
        del self._waiting[state.ordinal]
        most = 2 * len(self._waiting) + MAX_STALE_ENTRIES
        if len(self._heap) > most:
            self._heap = self._without_stale(self._heap)
            heapq.heapify(self._heap)
        passed = self._blocked.get(state.request.tenant, ())
        if len(passed) > most:
            self._blocked[state.request.tenant] = self._without_stale(passed)

    def first(self) -> RequestState | None:
        """Who is next, those of blocked tenants aside."""
        while self._heap:
            entry = self._heap[0]
            state = self._waiting.get(entry[1])
            if state is not None and state.request.tenant not in self._blocked:
                return state
            heapq.heappop(self._heap)
            if state is not None:
                self._blocked[state.request.tenant].append(entry)
        return None

    def block(self, tenant: str) -> None:
        """Passes over a tenant's requests from here on."""
        self._blocked.setdefault(tenant, [])

    def unblock(self, tenant: str) -> None:
        """Ends that."""
        for entry in self._blocked.pop(tenant, ()):
            if entry[1] in self._waiting:
                heapq.heappush(self._heap, entry)

    def _without_stale(self, entries: Iterable[tuple[Rank, int]]) -> list[tuple[Rank, int]]:
        return [entry for entry in set(entries) if entry[1] in self._waiting]

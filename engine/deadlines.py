"""Deadlines: when requests have no time left. No JAX."""

import heapq
import math
from collections.abc import Mapping

from .schedule import RequestState

MAX_STALE = 64  # beyond four for each live request


class Deadlines:
    """Of the live requests: their deadlines, and how long each may wait for its first slot.

    Requests that have ended stay named until their time comes, or until they are more than those
    that live: deadlines may be days away.
    """

    def __init__(self, queue_ttl_s: float | None, live: Mapping[str, RequestState]) -> None:
        """Knows of none.

        Args:
          queue_ttl_s: Seconds that any request may wait for its first slot; None: no bound.
          live: The live requests by id, as they are at any time.
        """
        self._queue_ttl_s = queue_ttl_s
        self._live = live
        # Time, ordinal, id, and whether it is only about waiting.
        self._heap: list[tuple[float, int, str, bool]] = []

    @property
    def next_s(self) -> float:
        """Before this time nobody's time is over."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, state: RequestState) -> None:
        """Enters a request's times."""
        for entry in self._entries(state):
            heapq.heappush(self._heap, entry)

    def expired(self, now_s: float) -> list[RequestState]:
        """Live requests whose time is over; each is named once, and its time is forgotten."""
        states: dict[str, RequestState] = {}
        while self._heap and self._heap[0][0] <= now_s:
            _, ordinal, request_id, is_wait = heapq.heappop(self._heap)
            state = self._live.get(request_id)
            if state is None or state.ordinal != ordinal:
                continue
            if not is_wait or state.admitted_s is None:
                states[request_id] = state
        return list(states.values())

    def forget(self) -> None:
        """Drops the times of requests that have ended, once they are the most."""
        if len(self._heap) > 4 * len(self._live) + MAX_STALE:
            self._heap = [entry for state in self._live.values() for entry in self._entries(state)]
            heapq.heapify(self._heap)

    def _entries(self, state: RequestState) -> list[tuple[float, int, str, bool]]:
        request, ordinal = state.request, state.ordinal
        found: list[tuple[float, int, str, bool]] = []
        if request.deadline_s is not None:
            found.append((request.deadline_s, ordinal, request.request_id, False))
        ttls = [ttl for ttl in (request.queue_ttl_s, self._queue_ttl_s) if ttl is not None]
        # Choices beyond the first wait for its prompt first; their request has had its slot.
        if ttls and state.admitted_s is None and state.leader is None:
            found.append((request.arrival_s + min(ttls), ordinal, request.request_id, True))
        return found

    def check(self) -> None:
        """Asserts that no more is remembered than is said."""
        assert len(self._heap) <= 4 * len(self._live) + MAX_STALE

"""Equal or weighted shares for tenants. No JAX."""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .keyed_queue import MAX_STALE_ENTRIES, KeyedQueue
from .schedule import Rank, RequestState

MAX_IDLE_TENANTS = 4096
TOKEN = 10**6
"""What a token adds to the counter of a tenant that weighs 1. Counters are whole numbers, so that
it does not matter in which order tokens are counted."""

SLOTS_PER_SHORT = 32
"""A tenant's queue is short with one request waiting, or with one for so many slots."""

MAX_DISPLACED = 4
"""How often a request gives way; it would never end if it did for ever."""


class FairQueue:
    """Whoever has been served least is next: virtual token counters.

    A tenant's counter is the tokens that were computed for it (prompt tokens that were not cached,
    and output tokens) over its weight. While tenants have requests waiting their counters stay
    within a bound of each other. A tenant that comes back after a pause starts at the lowest
    counter of those who are there: pauses save nothing up. Source: Sheng et al., Fairness in
    Serving Large Language Models, https://arxiv.org/abs/2401.00588, algorithm 2.

    No slot stays empty while requests wait, so a tenant that floods has all that others do not use.
    Their next request need not wait until one of its ends: it takes the place of one (`gives_way`).
    """

    keeps_count = True

    def __init__(self, weights: Mapping[str, float], num_slots: int, page_size: int) -> None:
        """Nobody waits.

        Args:
          weights: Of tenants that do not weigh 1.
          num_slots: Of the engine.
          page_size: Tokens per page.
        """
        self._page_size = page_size
        self._max_short = max(1, num_slots // SLOTS_PER_SHORT)
        self._steps = {tenant: round(TOKEN / weight) for tenant, weight in weights.items()}
        self._served: dict[str, int] = {}  # the counters
        self._num_live: Counter[str] = Counter()
        self._queues: dict[str, KeyedQueue] = {}  # of tenants with requests that wait
        self._blocked: set[str] = set()
        # Tenants by what was served and who is first. Counters grow without notice, so an entry may
        # be too low, and is corrected once it is the lowest; others than `_entered` are stale.
        self._heap: list[tuple[int, int, str]] = []
        self._entered: dict[str, tuple[int, int, str]] = {}
        self._num_waiting = 0
        self._num_ranked = 0
        self._floor = 0  # the lowest counter when there last was a tenant

    def __len__(self) -> int:
        """Requests that wait."""
        return self._num_waiting

    def __iter__(self) -> Iterator[RequestState]:
        """All of them."""
        for queue in self._queues.values():
            yield from queue

    def push(self, state: RequestState) -> None:
        """A request waits."""
        tenant = state.request.tenant
        if state.num_preemptions == 0:
            self._arrive(tenant)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = KeyedQueue(_ran_before_and_order)
        queue.push(state)
        self._num_waiting += 1
        self._enter(tenant)

    def remove(self, state: RequestState) -> None:
        """It waits no more."""
        tenant = state.request.tenant
        queue = self._queues[tenant]
        queue.remove(state)
        self._num_waiting -= 1
        if not queue:
            del self._queues[tenant]
            self._entered.pop(tenant, None)
            if len(self._heap) > 2 * len(self._queues) + MAX_STALE_ENTRIES:
                self._heap = list(self._entered.values())
                heapq.heapify(self._heap)

    def first(self, now_s: float) -> RequestState | None:
        """The first of the tenant that was served least."""
        heap = self._heap
        while heap:
            entry = heap[0]
            tenant = entry[-1]
            if self._entered.get(tenant) is not entry:
                heapq.heappop(heap)
            elif tenant in self._blocked:
                heapq.heappop(heap)
                del self._entered[tenant]
            else:
                now = self._entry(tenant)
                if now == entry:
                    return self._queues[tenant].first()
                self._entered[tenant] = now
                heapq.heapreplace(heap, now)
        return None

    def rank(self, state: RequestState) -> Rank:
        """The order in which slots were given: counters change, and a rank must not."""
        self._num_ranked += 1
        return (self._num_ranked,)

    def urgency(self, state: RequestState) -> Rank:
        """Whose tenant was served least, and of one tenant the earlier."""
        return (self._served[state.request.tenant], state.ordinal)

    def gives_way(
        self, newcomer: RequestState, running: Sequence[RequestState]
    ) -> list[RequestState]:
        """One of a tenant that was served more and has a long queue, for one with a short queue.

        Two that both have long queues would only take turns at computing things again. Of those
        that may go the one that has the least to compute again: the rest is in the prefix cache.
        """
        queues, served, tenant = self._queues, self._served, newcomer.request.tenant
        if len(queues[tenant]) > self._max_short:
            return []
        mine = served[tenant]
        floods = {
            other: served[other] > mine and len(queues.get(other, ())) > self._max_short
            for other in {each.request.tenant for each in running}
        }
        victims = [
            each
            for each in running
            if floods[each.request.tenant] and each.num_preemptions < MAX_DISPLACED
        ]
        return [min(victims, key=self._num_lost)] if victims else []

    def charge(self, state: RequestState, num_tokens: int) -> None:
        """Tokens are computed for a request."""
        tenant = state.request.tenant
        self._served[tenant] += num_tokens * self._steps.get(tenant, TOKEN)

    def depart(self, state: RequestState) -> None:
        """A request has ended."""
        tenant = state.request.tenant
        self._num_live[tenant] -= 1
        if not self._num_live[tenant]:
            del self._num_live[tenant]
            self._floor = self._lowest(self._served[tenant])
            self._forget_idle_tenants()

    def block(self, tenant: str) -> None:
        """A tenant has as many slots as it may have."""
        self._blocked.add(tenant)

    def unblock(self, tenant: str) -> None:
        """It has fewer again."""
        self._blocked.discard(tenant)
        if tenant in self._queues:
            self._enter(tenant)

    def _enter(self, tenant: str) -> None:
        """Sees to it that no entry of a tenant with requests that wait is too high."""
        entry = self._entry(tenant)
        if tenant not in self._entered or entry < self._entered[tenant]:
            self._entered[tenant] = entry
            heapq.heappush(self._heap, entry)

    def _entry(self, tenant: str) -> tuple[int, int, str]:
        first = self._queues[tenant].first()
        assert first is not None, "a queue without requests is kept"
        return (self._served[tenant], first.ordinal, tenant)

    def _num_lost(self, state: RequestState) -> int:
        """Tokens that a request would compute again if it lost its slot."""
        return state.num_computed_tokens - len(state.held) * self._page_size

    def _arrive(self, tenant: str) -> None:
        if not self._num_live[tenant]:
            floor = self._lowest(self._floor)
            self._served[tenant] = max(self._served.get(tenant, floor), floor)
        self._num_live[tenant] += 1

    def _lowest(self, otherwise: int) -> int:
        """The lowest counter of tenants with live requests, or what it is if there are none."""
        served = [self._served[tenant] for tenant, count in self._num_live.items() if count]
        return min(served, default=otherwise)

    def _forget_idle_tenants(self) -> None:
        """Drops counters that say nothing: those below the floor; and the lowest of too many."""
        if len(self._served) <= MAX_IDLE_TENANTS + 2 * len(self._num_live):
            return
        idle = sorted(
            (served, tenant)
            for tenant, served in self._served.items()
            if not self._num_live[tenant] and served > self._floor
        )
        kept = idle[len(idle) // 2 :] if len(idle) > MAX_IDLE_TENANTS // 2 else idle
        self._served = {
            tenant: served for tenant, served in self._served.items() if self._num_live[tenant]
        } | {tenant: served for served, tenant in kept}


def _ran_before_and_order(state: RequestState) -> Rank:
    """Preempted requests of a tenant come before those that never ran."""
    return (state.num_preemptions == 0, state.ordinal)

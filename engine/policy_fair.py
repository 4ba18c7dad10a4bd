"""Equal or weighted shares for tenants. No JAX."""

from collections import Counter
from collections.abc import Iterator, Mapping

from .keyed_queue import KeyedQueue
from .schedule import Rank, RequestState

MAX_IDLE_TENANTS = 4096
TOKEN = 10**6
"""What a token adds to the counter of a tenant that weighs 1. Counters are whole numbers, so that
it does not matter in which order tokens are counted."""

SLOTS_PER_LOAN = 32
"""One slot in so many is only lent to tenants with long queues."""


class FairQueue:
    """Whoever has been served least is next: virtual token counters.

    A tenant's counter is the tokens that were computed for it (prompt tokens that were not cached,
    and output tokens) over its weight. While tenants have requests waiting their counters stay
    within a bound of each other. A tenant that comes back after a pause starts at the lowest
    counter of those who are there: pauses save nothing up. Source: Sheng et al., Fairness in
    Serving Large Language Models, https://arxiv.org/abs/2401.00588, algorithm 2.

    No slot stays empty while requests wait. But whoever has more waiting than there are free slots
    would take them all, and the next request of others would wait until one ends. So the last slots
    are lent to such a tenant: a request in one of them gives way to the next one of a tenant that
    had none waiting, once. What it computed is in the prefix cache.
    """

    keeps_count = True
    displaces = True

    def __init__(self, weights: Mapping[str, float], num_slots: int) -> None:
        """Nobody waits.

        Args:
          weights: Of tenants that do not weigh 1.
          num_slots: Of the engine.
        """
        self._num_slots = num_slots
        self._num_loans = num_slots // SLOTS_PER_LOAN
        self._borrowers: set[int] = set()  # ordinals of requests that run in lent slots
        self._steps = {tenant: round(TOKEN / weight) for tenant, weight in weights.items()}
        self._served: dict[str, int] = {}  # the counters
        self._num_live: Counter[str] = Counter()
        self._queues: dict[str, KeyedQueue] = {}  # of tenants with requests that wait
        self._blocked: set[str] = set()
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
        self._borrowers.discard(state.ordinal)
        if state.num_preemptions == 0:
            self._arrive(tenant)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = KeyedQueue(_ran_before_and_order)
        queue.push(state)
        self._num_waiting += 1

    def remove(self, state: RequestState) -> None:
        """It waits no more."""
        tenant = state.request.tenant
        queue = self._queues[tenant]
        queue.remove(state)
        if not queue:
            del self._queues[tenant]
        self._num_waiting -= 1

    def first(self, now_s: float) -> RequestState | None:
        """The first of the tenant that was served least."""
        best: tuple[int, int] | None = None
        chosen = None
        for tenant, queue in self._queues.items():
            state = queue.first() if tenant not in self._blocked else None
            if state is None:
                continue
            key = (self._served[tenant], state.ordinal)
            if best is None or key < best:
                best, chosen = key, state
        return chosen

    def rank(self, state: RequestState) -> Rank:
        """The order in which slots were given, those that are lent last.

        Counters change, and a rank must not.
        """
        self._num_ranked += 1
        num_held = self._num_live.total() - self._num_waiting  # or all dispatched, and about to end
        num_free = max(self._num_slots - num_held, 0)
        is_one_of_last = num_free + len(self._borrowers) < self._num_loans
        num_behind = len(self._queues.get(state.request.tenant, ()))
        is_borrower = is_one_of_last and self._lends(num_behind, num_free)
        if is_borrower:
            self._borrowers.add(state.ordinal)
        return (is_borrower, self._num_ranked)

    def urgency(self, state: RequestState) -> Rank:
        """Whose tenant was served least, and of one tenant the earlier."""
        return (self._served[state.request.tenant], state.ordinal)

    def may_displace(self, newcomer: RequestState, running: RequestState) -> bool:
        """Whoever runs in a lent slot gives way to a tenant that was served less.

        Unless that would only borrow it too. Others keep theirs: slots come free soon enough, and
        what they have computed is paid for.
        """
        if running.ordinal not in self._borrowers:
            return False
        tenant = newcomer.request.tenant
        if tenant == running.request.tenant or self.urgency(newcomer) > self.urgency(running):
            return False
        return not self._lends(len(self._queues[tenant]) - 1, 0)

    def charge(self, state: RequestState, num_tokens: int) -> None:
        """Tokens are computed for a request."""
        tenant = state.request.tenant
        self._served[tenant] += num_tokens * self._steps.get(tenant, TOKEN)

    def depart(self, state: RequestState) -> None:
        """A request has ended."""
        tenant = state.request.tenant
        self._borrowers.discard(state.ordinal)
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

    def _lends(self, num_behind: int, num_free: int) -> bool:
        """Whether one of the last slots is only lent to whoever gets it.

        That is, if other tenants have nothing waiting, who would find no slot soon.

        Args:
          num_behind: What else its tenant has waiting.
          num_free: Slots that are left.
        """
        return len(self._num_live) > len(self._queues) and num_behind > num_free

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

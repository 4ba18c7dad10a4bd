"""Whose first token is due first. No JAX."""

from collections.abc import Iterator
from typing import override

from .keyed_queue import KeyedQueue
from .policy_fcfs import FcfsQueue
from .schedule import Rank, RequestState
from .step_costs import PromptCosts

LATE_TARGETS = 10


class DeadlineQueue(FcfsQueue):
    """Earliest deadline first, and those that cannot make it any more give way to those that can.

    A request is due at its arrival plus its TTFT target, or a default target. In overload earliest
    deadline first alone makes everybody late, because it goes on with the latest. So a request
    whose first token can no longer come in time is due anew, LATE_TARGETS default targets later:
    it stands behind those that can still be kept, and not for ever.
    """

    def __init__(self, default_target_s: float, costs: PromptCosts) -> None:
        """Nobody waits.

        Args:
          default_target_s: TTFT target of requests that bring none.
          costs: Predict how long a prompt takes.
        """
        super().__init__()
        self._default_target_s = default_target_s
        self._costs = costs
        self._late = KeyedQueue(lambda state: (self._late_due_s(state), state.ordinal))
        self._late_ordinals: set[int] = set()

    @override
    def __len__(self) -> int:
        return len(self._queue) + len(self._late)

    @override
    def __iter__(self) -> Iterator[RequestState]:
        yield from self._queue
        yield from self._late

    @override
    def push(self, state: RequestState) -> None:
        (self._late if state.ordinal in self._late_ordinals else self._queue).push(state)

    @override
    def remove(self, state: RequestState) -> None:
        (self._late if state.ordinal in self._late_ordinals else self._queue).remove(state)

    @override
    def first(self, now_s: float) -> RequestState | None:
        """Who is due first of those that can make it, unless a late one has waited enough."""
        while (state := self._queue.first()) is not None and self._is_hopeless(state, now_s):
            self._queue.remove(state)
            self._late_ordinals.add(state.ordinal)
            self._late.push(state)
        late = self._late.first()
        if state is None or (late is not None and self._late_due_s(late) < self._due_s(state)):
            return late
        return state

    @override
    def rank(self, state: RequestState) -> Rank:
        """When it is due."""
        is_late = state.ordinal in self._late_ordinals
        return (self._late_due_s(state) if is_late else self._due_s(state), state.ordinal)

    @override
    def depart(self, state: RequestState) -> None:
        self._late_ordinals.discard(state.ordinal)

    @override
    def block(self, tenant: str) -> None:
        super().block(tenant)
        self._late.block(tenant)

    @override
    def unblock(self, tenant: str) -> None:
        super().unblock(tenant)
        self._late.unblock(tenant)

    def _due_s(self, state: RequestState) -> float:
        target_s = state.request.ttft_target_s
        return state.request.arrival_s + (self._default_target_s if target_s is None else target_s)

    def _late_due_s(self, state: RequestState) -> float:
        return self._due_s(state) + LATE_TARGETS * self._default_target_s

    def _is_hopeless(self, state: RequestState, now_s: float) -> bool:
        """Its first token would come late even if it got a slot at once."""
        if state.num_preemptions:
            return False  # it had its chance
        end = state.prefill_end
        return now_s + self._costs.prefill_s(end - state.num_uncached_tokens, end) > self._due_s(
            state
        )

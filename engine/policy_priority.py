"""The higher priority first, and waiting counts. No JAX."""

from collections.abc import Sequence
from typing import override

from .policy_fcfs import FcfsQueue
from .schedule import Rank, RequestState


class PriorityQueue(FcfsQueue):
    """Priority p at time t stands where priority 0 at t - p x ageing would.

    So waiting `ageing_s` seconds weighs as much as one step of priority: of two requests the same
    one is ahead at all times, and nobody waits longer for later ones than the range of priorities
    times ageing_s. Cases: a stream of high priorities that starved a low one, and equal ones that
    displaced each other in turn (https://github.com/vllm-project/vllm/issues/41951).
    """

    def __init__(self, ageing_s: float) -> None:
        """Nobody waits; ageing_s: seconds that weigh one step of priority."""
        super().__init__()
        self._ageing_s = ageing_s

    @override
    def rank(self, state: RequestState) -> Rank:
        """When a request of priority 0 would have had to come, and the order of arrival."""
        request = state.request
        return (request.arrival_s - request.priority * self._ageing_s, state.ordinal)

    @override
    def gives_way(
        self, newcomer: RequestState, running: Sequence[RequestState]
    ) -> list[RequestState]:
        """Those of strictly lower priority, unless they got their slots by having waited."""
        priority, rank = newcomer.request.priority, self.rank(newcomer)
        return [
            each
            for each in reversed(running)
            if each.request.priority < priority and each.rank > rank
        ]

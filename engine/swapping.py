"""Swapping: whom a deterministic engine swapped out, and whom it admits beside them. No JAX."""

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from .kv_memory import KVMemory
from .schedule import RequestState
from .swap_reserve import SwapReserve


class Swapping:
    """Preempted requests keep their KV in host memory, and whoever is admitted finds room there.

    Attributes:
      reserve: Counts the admitted: those that run and those that are swapped out.
      swapped: The latter, by rank. They wait, with their KV in host memory.
    """

    def __init__(self, memory: KVMemory, max_host_pages: int) -> None:
        """Nobody is admitted; max_host_pages are for those that are swapped out."""
        self.reserve = SwapReserve(memory.pool.num_usable, max_host_pages)
        self.swapped: list[RequestState] = []
        self._memory = memory

    def admissible(
        self, first: RequestState, may_run: Callable[[RequestState], bool]
    ) -> RequestState | None:
        """Who is next, given who is first in the queue.

        While the reserve does not admit `first`, the lowest rank of those that were admitted and
        swapped out, lest they wait for it and it for them.

        Args:
          first: By the policy.
          may_run: Whether its tenant may have one more slot.
        """
        reserve = self.reserve
        if first in reserve or reserve.admits(self._memory.pages(first.max_kv_tokens)):
            return first
        return next(filter(may_run, self.swapped), None)

    def first_to_fit(self, victims: list[RequestState]) -> list[RequestState]:
        """The first of them, as many as there is room for in host memory."""
        room, taken = self._memory.num_swap_room, 0
        for count, victim in enumerate(victims):
            taken += self._memory.pages(victim.num_computed_tokens)
            if taken > room:
                return victims[:count]
        return victims

    def admit(self, state: RequestState) -> None:
        """A newcomer gets a slot; raises ValueError if it is not admissible."""
        self.reserve.enter(state, self._memory.pages(state.max_kv_tokens))

    def swap_out(self, state: RequestState, now_s: float) -> None:
        """Takes the pages of a request that lost its slot; raises ValueError without room."""
        self._memory.swap_out(state, now_s)
        insort(self.swapped, state, key=attrgetter("rank"))

    def swap_in(self, state: RequestState, now_s: float) -> None:
        """Gives a request that gets its slot back its KV; raises ValueError without pages."""
        self.swapped.remove(state)
        self._memory.swap_in(state, state.prefill_end, now_s)

    def leave(self, state: RequestState) -> None:
        """A request has no token left to sample, or ended; it need not be admitted."""
        self.reserve.leave(state)
        if state in self.swapped:
            self.swapped.remove(state)
            self._memory.drop_copies(state)

    def check(self, running: list[RequestState], waiting: list[RequestState]) -> None:
        """Asserts that who lost its slot has all its KV on the host, and a place in the reserve.

        Args:
          running: Who has a slot.
          waiting: Who has none, and tokens left to sample.
        """
        ranks = [state.rank for state in self.swapped]
        assert ranks == sorted(ranks)
        for state in self.swapped:
            assert state in waiting, "swapped out, and does not wait"
            assert len(state.copies) == self._memory.pages(state.num_computed_tokens)
            assert state.num_committed_tokens <= state.num_computed_tokens
        for state in waiting:
            was_admitted = state.admitted_s is not None
            assert was_admitted == (state in self.swapped), "what it had computed is lost"
        self.reserve.check()
        admitted = [*running, *self.swapped]
        assert all(state in self.reserve for state in admitted)
        assert len(self.reserve) == len(admitted), "a place in the reserve is lost"

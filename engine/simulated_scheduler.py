"""SimulatedScheduler: many steps at once, for devices that exist only in numbers. No JAX.

Most steps of a long run only decode the rows of the step before. Where that is certain, they are
done in one go, with the same result as one by one (a test compares them).
"""

import math
from collections.abc import Sequence

from .schedule import Schedule
from .scheduler import Scheduler


class SimulatedScheduler(Scheduler):
    """The scheduler, and what only a simulation can do with it."""

    def num_steady_rounds(self, unread: Schedule, now_s: float, most: int) -> int:
        """How many rounds, at most `most`, are certain to do nothing but decode the same rows.

        A round schedules a step and then reads the one before it; `unread` is that in flight. No
        round is certain from the next deadline on (`next_deadline_s`), nor once a token stops a
        request, which only the caller can know.
        """
        running = self.running
        if unread.chunks or len(unread.decodes) != len(running) or not running:
            return 0
        if self._num_prefilling or self._all_dispatched or self.ending:
            return 0
        if self.waiting and not self._nobody_can_start(now_s):
            return 0
        for row, generation, state in zip(unread.decodes, unread.generations, running, strict=True):
            if row is not state or generation != state.generation:
                return 0
            most = min(most, state.max_tokens - state.num_sampled)
        while most > 0 and not self._pages_suffice(most):
            most //= 2
        return most

    @property
    def next_deadline_s(self) -> float:
        """Before this time nobody's time is over."""
        return self._deadlines.next_s

    def advance_decodes(self, times_s: Sequence[float], token_id: int) -> None:
        """Does steady rounds (num_steady_rounds) at once, with the same effect as one by one.

        The transfers and events of their schedules go into the next one; their page entries go
        nowhere, so this is for devices that are simulated.

        Args:
          times_s: When each round's step is scheduled.
          token_id: What each row samples in each of the steps that are read.
        """
        count, size = len(times_s), self._config.page_size
        happenings: list[tuple[int, bool, int]] = []  # round, whether a page is published, row
        for row, state in enumerate(self.running):
            grows_in = len(state.page_ids) * size - state.num_computed_tokens
            happenings += [(at, False, row) for at in range(grows_in, count, size)]
            published_in = state.publish_at - state.num_committed_tokens - 1
            happenings += [(at, True, row) for at in range(published_in, count, size)]
            state.output_token_ids += [token_id] * count
        happenings.sort()
        committed = [state.num_committed_tokens for state in self.running]
        for at, is_publish, row in happenings:
            state = self.running[row]
            if not is_publish:
                self.memory.grow(state, times_s[at])
                state.num_entered_pages += 1
            elif state.chain is not None:
                state.num_committed_tokens = committed[row] + at + 1
                self.memory.publish(state)
        for row, state in enumerate(self.running):
            state.num_committed_tokens = committed[row] + count
            state.num_computed_tokens += count
            state.num_sampled += count
            if state.num_sampled == state.max_tokens:
                self._all_dispatched.append(state)
            self.waiting.charge(state, count)

    def _nobody_can_start(self, now_s: float) -> bool:
        """Nobody who waits can get a slot, or ends, as long as those that run go on."""
        if self._free_slots or self._deadlines.next_s < math.inf:
            return False
        waiting = self.waiting
        if waiting.keeps_count:
            return False  # what is computed changes whose turn it is
        first = waiting.first(now_s)
        return first is None or not waiting.gives_way(first, self.running)

    def _pages_suffice(self, num_rounds: int) -> bool:
        """There are certainly pages for so many tokens more of each row; twice as many, at most."""
        needed = len(self.running)
        for state in self.running:
            pages = self.memory.pages(state.num_computed_tokens + num_rounds)
            needed += 2 * (pages - len(state.page_ids))
        return needed <= self.memory.num_available

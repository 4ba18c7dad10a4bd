"""Bound: how much there may be of one thing, and the places in it that were promised. No JAX.

A promise says: come back at this time, and there will be a place. The promises of a bound are a
virtual queue in front of it: they are spaced by the pace at which the bound drains, and whoever is
let in meanwhile leaves room for them.
"""

import bisect
import math
from typing import Protocol, runtime_checkable

from .drain_rate import DrainRate

# Promises count on less than the measured pace, and on less than the whole room, because what
# drains is random: without the two, a promise is as often broken as kept. Newcomers take up what
# is left over, so nothing idles.
PLANNED_SHARE = 0.9
MARGIN_SHARE = 0.125


@runtime_checkable
class Client(Protocol):
    """To whom promises are made."""

    kept_share: float
    """The part of them whose place will be taken up, as far as is known now."""


class Bound:
    """A counter, what it may reach, its drain rate, and the promises on it.

    Attributes:
      used: How much there is now. More than the bound where it grew without asking (a preempted
        request waits again).
      rate: The pace at which it drains.
    """

    def __init__(
        self,
        *,
        floor: int = 0,
        slots: int = 0,
        room: int | None = None,
        wait_s: float | None = None,
        counts_own: bool = True,
        takes_any: bool = False,
        start_per_s: float,
        now_s: float,
    ) -> None:
        """Starts empty.

        Args:
          floor: How much there is before anything waits. From here on the pace is measured, since
            below it what leaves is limited by what came.
          slots: How much of it is served at once: less, and something idles.
          room: How much more there may be. None: no bound.
          wait_s: Instead of room: what drains in this time, at the present pace.
          counts_own: Whether what a newcomer brings must fit too, or only what is ahead of it.
          takes_any: Whether a newcomer that exceeds the whole room may come when nothing is there.
          start_per_s: The pace to assume before anything was measured.
          now_s: The time.
        """
        self.used = 0
        self.rate = DrainRate(start_per_s)
        self._floor, self._wait_s = floor, wait_s
        self._room = math.inf if room is None else float(room)
        self._slots = slots
        self._counts_own = counts_own
        self._takes_any = takes_any
        self._watched_to_s = now_s
        self._promises: list[tuple[float, int, int, Client]] = []  # due_s, number, size; sorted
        self._expected = 0.0  # their sizes, times how likely each is taken up

    @property
    def room(self) -> float:
        """What may be there beyond the floor."""
        return self._room if self._wait_s is None else self._wait_s * self.rate.per_s

    @property
    def num_promises(self) -> int:
        """Promises outstanding."""
        return len(self._promises)

    def pace(self, now_s: float) -> float:
        """What drains in a second, above 0."""
        self._watch(now_s)
        return self.rate.per_s

    def fits(self, size: int) -> bool:
        """Whether there is a place, promises or not."""
        if self._takes_any and not self.used:
            return True
        return self.used + (size if self._counts_own else 0) <= self._floor + self.room

    def earliest_s(self, size: int, now_s: float) -> float:
        """The earliest time at which a newcomer has a place and every promise is still kept.

        What would idle is kept for nobody: up to `slots`, and where there is nothing at all, there
        is a place at once. Else clients who never come back would stop a small queue.

        Args:
          size: What it brings.
          now_s: The time.

        Returns:
          now_s if there is a place at once.
        """
        self._watch(now_s)
        room = self.room
        if room == math.inf:
            return now_s
        would_idle = self.used == 0 or self.used + size <= self._slots
        if (would_idle or not self._promises) and self.fits(size):
            return now_s
        per_s = self.rate.per_s * PLANNED_SHARE
        own = float(size) if self._counts_own else 0.0
        if self._takes_any:
            own = min(own, room)
        limit = self._floor + room - max(own, room * MARGIN_SHARE)
        # It goes behind the last promise that it would break. ahead: what is there now, and the
        # promises up to and including this one.
        ahead = self.used + self._expected
        for due_s, _, promised, client in reversed(self._promises):
            if size + ahead <= limit:
                break  # even if nothing drained, this one and those before it would be kept
            expected = promised * client.kept_share
            in_s = max(due_s - now_s, 0.0)
            at_most = limit if self._counts_own else limit + expected
            if size + ahead - per_s * in_s > at_most:
                return max(due_s, now_s + (ahead + own - limit) / per_s)
            ahead -= expected
        if self.fits(size):
            return now_s
        return now_s + max(0.0, ahead + own - limit) / per_s

    def promise(self, due_s: float, number: int, size: int, client: Client) -> None:
        """Keeps a place from `due_s` on, until it is released. Numbers tell promises apart."""
        bisect.insort(self._promises, (due_s, number, size, client))
        self._expected += size * client.kept_share

    def release(self, due_s: float, number: int) -> None:
        """Forgets a promise."""
        at = bisect.bisect_left(self._promises, (due_s, number))
        _, _, size, client = self._promises.pop(at)
        self._expected -= size * client.kept_share
        if not self._promises:
            self._expected = 0.0  # sums of fractions drift

    def expect(self, more: float) -> None:
        """Of what is promised, so much more is likely to be taken up than was thought."""
        self._expected += more

    def enter(self, size: int, now_s: float) -> None:
        """So much more is there."""
        self._watch(now_s)
        self.used += size

    def drain(self, size: int, now_s: float) -> None:
        """So much has gone the way that makes room for others, which tells the pace."""
        if self._watch(now_s):
            self.rate.count(size)
        self.used -= size

    def correct(self, size: int, now_s: float) -> None:
        """So much was never there, or went another way, which tells nothing about the pace."""
        self._watch(now_s)
        self.used -= size

    def check(self) -> None:
        """Asserts that the counts are counts and that the promises are in order."""
        assert self.used >= 0, f"{self.used} are in use"
        assert self._promises == sorted(self._promises), "promises are out of order"
        expected = math.fsum(size * client.kept_share for _, _, size, client in self._promises)
        assert math.isclose(self._expected, expected, rel_tol=1e-6, abs_tol=1e-6)
        assert self.rate.per_s > 0

    def _watch(self, now_s: float) -> bool:
        """Lets the time until now count for the pace if there was pressure; says if so."""
        is_pressed = self.used > 0 and self.used >= self._floor
        if is_pressed:
            self.rate.watch(now_s - self._watched_to_s)
        self._watched_to_s = now_s
        return is_pressed

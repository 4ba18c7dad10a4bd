"""SwapReserve: whom to admit so that a preempted request's KV finds room on the host. No JAX.

A deterministic engine never computes a token twice: what it computes again may be other bits. So a
preempted request's pages move to host memory ("it is swapped out") and come back.
"""

from .schedule import RequestState


class SwapReserve:
    """Counts the pages that the admitted may grow to.

    Admitted is who got a slot once and still has tokens to sample: it runs, or is swapped out. With
    D pages on the device, R on the host, S the pages to which all admitted may grow and M the most
    to which one of them may, a newcomer is admitted only if, itself counted in,

        S <= D  or  S + M <= D + R.

    Both still hold when somebody leaves: S falls, and M does not rise.

    **Who must give way has room on the host.** Somebody needs a page and there is none: those that
    run hold all D, and by their number of pages at least that, since several may read one. Let H
    be the pages of those that are swapped out, and v those of the victim. Pages held are never more
    than pages grown to, and the one in need will have one more: H + D + 1 <= S, so S > D, so
    S + M <= D + R. Then H + M + 1 <= S + M - D <= R, and v <= M: there is room for v.

    **Somebody always advances.** Of those that run the lowest rank is never preempted for others,
    and alone it has all D pages, to no more of which it may grow. If nobody runs, whoever is
    swapped out finds all D pages free, and comes back before newcomers that may not be admitted
    (engine.swapping); and if nobody is swapped out either, S = M <= D for any newcomer.

    To displace somebody for a request that comes first is no need: it is done only where there is
    room (engine.swapping).
    """

    def __init__(self, num_device_pages: int, num_host_pages: int) -> None:
        """Nobody is admitted.

        Args:
          num_device_pages: That requests can hold.
          num_host_pages: For those that are swapped out.
        """
        self._num_device_pages = num_device_pages
        self._num_host_pages = num_host_pages
        self._admitted: dict[RequestState, int] = {}  # pages that each may grow to
        self._total = 0

    def __contains__(self, state: RequestState) -> bool:
        """Whether a request is admitted."""
        return state in self._admitted

    def __len__(self) -> int:
        """How many are admitted."""
        return len(self._admitted)

    def admits(self, max_pages: int) -> bool:
        """Whether a newcomer that may grow to so many pages can be admitted."""
        return self._holds(self._total + max_pages, max_pages)

    def enter(self, state: RequestState, max_pages: int) -> None:
        """A request is admitted; raises ValueError if it must not be."""
        if not self.admits(max_pages):
            raise ValueError(f"{max_pages} pages are more than the reserve for preemption allows")
        self._admitted[state] = max_pages
        self._total += max_pages

    def leave(self, state: RequestState) -> None:
        """It has no token left to sample, or ended; nothing happens if it was not admitted."""
        self._total -= self._admitted.pop(state, 0)

    def _holds(self, total: int, newcomer: int) -> bool:
        if total <= self._num_device_pages:
            return True
        most = max(self._admitted.values(), default=0)
        return total + max(most, newcomer) <= self._num_device_pages + self._num_host_pages

    def check(self) -> None:
        """Asserts the bound, and that the sum is one."""
        assert self._total == sum(self._admitted.values())
        assert self._holds(self._total, 0), "more are admitted than can be preempted"

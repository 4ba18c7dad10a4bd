"""DrainRate: how fast something drains, from what was seen to leave. Pure arithmetic. No JAX."""

import math

WINDOW_S = 30.0  # forgets a pace in half a minute, and still averages over hundreds of requests
START_S = 0.5  # a start value weighs as much as this many seconds of watching
MIN_PER_S = 1e-9  # never zero, so that times computed from it are finite


class DrainRate:
    """Amount per second, exponentially weighted over the time that was watched.

    Only time under pressure is watched: while there is little to drain, little leaves, which says
    nothing about the pace. Time that is not watched does not age what was learned either.
    """

    def __init__(self, start_per_s: float) -> None:
        """Starts from a guess.

        Args:
          start_per_s: The pace to assume before anything was seen; above 0.

        Raises:
          ValueError: start_per_s is no pace.
        """
        if not (math.isfinite(start_per_s) and start_per_s > 0):
            raise ValueError(f"start_per_s is {start_per_s}; it must be above 0 and finite")
        self._amount = start_per_s * START_S
        self._watched_s = START_S

    @property
    def per_s(self) -> float:
        """The pace now; above 0."""
        return max(self._amount / self._watched_s, MIN_PER_S)

    def watch(self, elapsed_s: float) -> None:
        """Seconds under pressure have passed."""
        kept = math.exp(-elapsed_s / WINDOW_S)
        self._amount *= kept
        self._watched_s = self._watched_s * kept + WINDOW_S * (1 - kept)

    def count(self, amount: int) -> None:
        """So much has left, under pressure."""
        self._amount += amount

"""RouterMemory: what a router remembers of what it sent where. Bounded. No JAX."""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

GIVEN_S = 30.0
"""Work that was given counts for about this long."""

_DECAY_EVERY_S = 1.0


class RouterMemory:
    """Which replica got which prompts, and how much work.

    Attributes:
      given: Tokens given to each replica lately, by its name; they fade within GIVEN_S.
    """

    def __init__(self, max_keys: int) -> None:
        """Nothing was sent.

        Args:
          max_keys: Pages of prompts to remember, the least recently sent are forgotten: about as
            many as all replicas hold together.
        """
        self.given: dict[str, float] = {}
        self._max_keys = max_keys
        self._holders: OrderedDict[bytes, dict[str, None]] = OrderedDict()
        # What was sent since the last report: (time, prompt tokens to compute).
        self._unreported: dict[str, deque[tuple[float, int]]] = {}
        self._faded_s = -math.inf

    def __len__(self) -> int:
        """Pages that are remembered."""
        return len(self._holders)

    def held_pages(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of a prompt's first pages each replica is believed to hold, by its name."""
        held: dict[str, int] = {}
        names: set[str] | None = None
        for count, key in enumerate(keys, start=1):
            holders = self._holders.get(key)
            if holders is None:
                break
            names = set(holders) if names is None else names & holders.keys()
            if not names:
                break
            held |= dict.fromkeys(names, count)
        return held

    def unreported(self, name: str, reported_s: float) -> int:
        """Prompt tokens that a replica has to compute and did not know of when it reported."""
        return sum(tokens for at_s, tokens in self._unreported.get(name, ()) if at_s > reported_s)

    def sent(
        self, name: str, keys: Sequence[bytes], *, prompt_tokens: int, num_tokens: int, now_s: float
    ) -> None:
        """A request went to a replica.

        Args:
          name: Of the replica.
          keys: Of the prompt's full pages.
          prompt_tokens: Prompt tokens that are to be computed for it.
          num_tokens: These, and the output that is expected.
          now_s: The time.
        """
        self._fade(now_s)
        self.given[name] = self.given.get(name, 0.0) + num_tokens
        self._unreported.setdefault(name, deque()).append((now_s, prompt_tokens))
        for key in reversed(keys):  # so that a page is forgotten before those in front of it
            self._holders.setdefault(key, {})[name] = None
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def reported(self, name: str, at_s: float) -> None:
        """A replica's report of this time has come."""
        self.given.setdefault(name, 0.0)
        unreported = self._unreported.get(name)
        while unreported and unreported[0][0] <= at_s:
            unreported.popleft()

    def forget(self, name: str) -> None:
        """A replica is gone, or has started anew: it holds nothing."""
        self.given.pop(name, None)
        self._unreported.pop(name, None)
        for key, holders in list(self._holders.items()):
            holders.pop(name, None)
            if not holders:
                del self._holders[key]

    def _fade(self, now_s: float) -> None:
        elapsed_s = now_s - self._faded_s
        if elapsed_s >= _DECAY_EVERY_S:
            kept = math.exp(-elapsed_s / GIVEN_S)
            self.given = {name: tokens * kept for name, tokens in self.given.items()}
            self._faded_s = now_s

"""Log-probabilities on their way to a reader, of a prompt or an output: flat, growing lists."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

MAX_ENTRIES_PER_PIECE = 8192
"""Bounds one event: an entry is a token or one of its most likely ids. With log-probabilities and
text that is well below the message limit of clients."""


def tokens_per_piece(num_top: int) -> int:
    """How many tokens one event takes, each with so many most likely ids; at least 1."""
    return max(1, MAX_ENTRIES_PER_PIECE // (1 + num_top))


@dataclass(kw_only=True, slots=True)
class Logprobs:
    """Of places that follow one another.

    Attributes:
      values: One for each place.
      top_token_ids, top_values: The most likely ids and their log-probabilities, so many for each
        place as were asked for; one place after the other.
    """

    values: "array[float]" = field(default_factory=partial(array, "f"))
    top_token_ids: "array[int]" = field(default_factory=partial(array, "i"))
    top_values: "array[float]" = field(default_factory=partial(array, "f"))

    def extend(
        self,
        values: Sequence[float],
        top_token_ids: Sequence[int],
        top_values: Sequence[float],
        places: slice,
    ) -> None:
        """Adds those of some places out of lists of the same form."""
        num_top = len(top_token_ids) // len(values)
        tops = slice(places.start * num_top, places.stop * num_top)
        self.values.extend(values[places])
        self.top_token_ids.extend(top_token_ids[tops])
        self.top_values.extend(top_values[tops])

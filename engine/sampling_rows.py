"""How the rows of a batch sample: what their requests ask for, as arrays on the device."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from .row_groups import take_rows

ALL = 2**31 - 1  # a top_k that keeps every token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """How each row samples. Rows that are padding must hold temperature 0.

    Attributes:
      temperature: 0: greedy.
      top_k: Tokens to keep; 0 or at least the vocabulary: all.
      top_p: Mass to keep; 1: all.
      min_p: Least likelihood to keep, relative to the most likely token; 0: all.
      seed: Two words of the request's seed.
      position: Output position of the token, from 0.
      choice: Which of the request's choices it is.
    """

    temperature: Float[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    seed: UInt32[Array, "rows 2"]
    position: Int32[Array, " rows"]
    choice: Int32[Array, " rows"]

    @property
    def is_truncated(self) -> Bool[Array, " rows"]:
        """Rows that may leave out a token. Their top_k must be that of `for_vocabulary`."""
        return (self.top_k < ALL) | (self.top_p < 1) | (self.min_p > 0)

    def for_vocabulary(self, size: int) -> "SamplingRows":
        """The same, with ALL wherever top_k keeps all of so many tokens."""
        keeps_all = (self.top_k <= 0) | (self.top_k >= size)
        return replace(self, top_k=jnp.where(keeps_all, ALL, self.top_k))

    def take(self, rows: Int32[Array, " some"]) -> "SamplingRows":
        """Some rows; a number past them reads the last."""
        return take_rows(self, rows)

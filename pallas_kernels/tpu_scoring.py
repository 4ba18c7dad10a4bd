"""What becomes of q k^T: scale, soft cap and masks of one block of keys. No refs: arrays alone."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from .tpu_leaves import token_of_row

LOWEST = -1e30  # a score that is not seen: finite, so that nothing ever computes inf - inf


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What becomes of q k^T. All static.

    Attributes:
      scale: Multiplies it; positive.
      window: Tokens that a query sees, its own included; None: all.
      softcap: Bounds scores smoothly; positive. None: not at all.
    """

    scale: float
    window: int | None
    softcap: float | None

    @property
    def unit(self) -> float:
        """What a difference of 1 between two bounded scores stands for."""
        return self.scale if self.softcap is None else self.softcap

    def bounded(self, products: jax.Array) -> jax.Array:
        """Scores over the unit, which is multiplied in with what exp needs anyway."""
        if self.softcap is None:
            return products
        return jnp.tanh(products * (self.scale / self.softcap))

    def weight(self, difference: jax.Array) -> jax.Array:
        """The softmax weight of a score that is so much above another."""
        return jnp.exp2(difference * (self.unit * math.log2(math.e)))


def visible(
    position: jax.Array, shape: tuple[int, int], tile: int, window: int | None
) -> jax.Array:
    """Which of a block's tokens each row sees: those up to its own, the window's.

    Args:
      position: Of the tile's first token, from the block's begin.
      shape: Rows, and tokens of the block.
      tile: Query tokens of the tile.
      window: Tokens that a query sees, or None.
    """
    token = lax.broadcasted_iota(jnp.int32, shape, 1)
    own = token_of_row(lax.broadcasted_iota(jnp.int32, shape, 0), tile) + position
    is_seen = token <= own
    return is_seen if window is None else is_seen & (token > own - window)


def alive(first_key: jax.Array, end_key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Which of a block's tokens any row sees; the buffer may hold anything in place of others."""
    token = lax.broadcasted_iota(jnp.int32, shape, 0)
    return (token >= first_key) & (token < end_key)

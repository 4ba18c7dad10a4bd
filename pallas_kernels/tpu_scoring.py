"""What becomes of q k^T: scale, soft cap and masks of one block of keys. No refs: arrays alone."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from .backend import Scoring
from .tpu_leaves import token_of_row


def unit(scoring: Scoring) -> float:
    """What a difference of 1 between two bounded scores stands for."""
    return scoring.scale if scoring.softcap is None else scoring.softcap


def bounded(products: jax.Array, scoring: Scoring) -> jax.Array:
    """Scores over the unit, which is multiplied in with what exp needs anyway."""
    if scoring.softcap is None:
        return products
    return jnp.tanh(products * (scoring.scale / scoring.softcap))


def weight(difference: jax.Array, scoring: Scoring) -> jax.Array:
    """The softmax weight of a bounded score that is so much above another."""
    return jnp.exp2(difference * (unit(scoring) * math.log2(math.e)))


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

"""The arithmetic that the GPU kernels share: scores in base 2, and what keeps NaN out of sums."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from .backend import Scoring

LOG2_E = math.log2(math.e)

Layout = Any  # a plgpu.Layout with its arguments, whose class has no public name


def first_seen(kv_len: Int32[Array, ""], window: int | None) -> Int32[Array, ""]:
    """First of kv_len tokens that the last one sees."""
    return jnp.maximum(kv_len - window, 0) if window is not None else jnp.int32(0)


def base_2(
    products: Float[Array, "queries tokens"], scoring: Scoring
) -> Float[Array, "queries tokens"]:
    """Scores times log2(e), so that exp2 of them weighs."""
    if scoring.softcap is None:
        return products * (scoring.scale * LOG2_E)
    # tanh(x) = 1 - 2 / (exp(2x) + 1). The hardware's own tanh is right to 11 bits only, which
    # at a cap of 50 is 2 % of a weight.
    powers = jnp.exp2(products * (2 * LOG2_E * scoring.scale / scoring.softcap))
    return (1 - 2 / (powers + 1)) * (scoring.softcap * LOG2_E)


def mask_scores(
    scores: Float[Array, "queries tokens"], seen: Bool[Array, "queries tokens"]
) -> Float[Array, "queries tokens"]:
    """Scores of what is not seen become so low that they weigh nothing."""
    return jnp.where(seen, scores, -jnp.inf)


def weigh(
    scores: Float[Array, "queries tokens"], high: Float[Array, " queries"]
) -> tuple[Float[Array, " queries"], Float[Array, " queries"], Float[Array, "queries tokens"]]:
    """One step of a running softmax: the new maximum, by what sums fade, and the weights."""
    new_high = jnp.maximum(high, scores.max(axis=1))
    return new_high, jnp.exp2(high - new_high), jnp.exp2(scores - along_rows(new_high, scores))


def clear_unseen(
    values: Float[Array, "tokens width"],
    first: Int32[Array, ""],
    seen_from: Int32[Array, ""],
    seen_to: Int32[Array, ""],
    layout: Layout,
) -> Float[Array, "tokens width"]:
    """Zeroes values of tokens outside [seen_from, seen_to): a weight of 0 times NaN would be NaN.

    Args:
      values: Of consecutive tokens.
      first: The first of them.
      seen_from: First token that anybody sees.
      seen_to: One past the last.
      layout: Of values in registers.
    """

    def clear(values: jax.Array) -> jax.Array:
        token = first + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
        zeros = plgpu.layout_cast(jnp.zeros(values.shape, values.dtype), layout)
        return jnp.where((token >= seen_from) & (token < seen_to), values, zeros)

    def keep(values: jax.Array) -> jax.Array:
        return values

    is_border = (first < seen_from) | (first + values.shape[0] > seen_to)
    return lax.cond(is_border, clear, keep, values)


def along_rows(column: Float[Array, " rows"], like: jax.Array) -> jax.Array:
    """One number per row to all of its row."""
    return lax.broadcast_in_dim(column, like.shape, [0])


def full(shape: tuple[int, ...], value: jax.Array | float, layout: Layout) -> jax.Array:
    """An array of one number, in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def store(target: Any, values: jax.Array) -> None:
    """Stores registers, in whatever pieces they come."""
    if hasattr(plgpu, "store"):
        plgpu.store(target, values, optimized=False)
    else:  # JAX 0.11, whose assignments do just that
        target[...] = values

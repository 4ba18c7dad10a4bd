"""What top-k, top-p and min-p leave, found in two ways: narrow and wide.

Top-k keeps the highest logits: two that differ may round to one likelihood, so likelihoods would
not tell which they are. Top-p keeps the most likely of these, and min-p tokens that are likely
enough. At every border the lowest of equal ids stay, and of all three the most likely token.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from .sampling_rows import ALL, SamplingRows
from .vocabulary_blocks import folded_sum, highest_tokens, sums_before

NARROW = 64  # candidates of the narrow way
LEAST_MASS = 1e-30  # less than any token's that could be drawn


def draw_narrow(
    blocks: Float[Array, "rows blocks block"],
    block_high: Float[Array, "rows blocks"],
    likelihood: Float[Array, "rows blocks block"],
    rows: SamplingRows,
    chance: Float[Array, " rows"],
) -> tuple[Int32[Array, " rows"], Bool[Array, " rows"]]:
    """A draw among the NARROW highest logits, and whether all survivors are among them.

    Args:
      blocks: Logits.
      block_high: The highest of each block.
      likelihood: Of each token, relative to the most likely one.
      rows: How each row samples.
      chance: The number in [0, 1) that decides.
    """
    _, token = highest_tokens(blocks, block_high, NARROW)
    value = jnp.take_along_axis(likelihood.reshape(token.shape[0], -1), token, axis=1)

    in_k = jnp.where(jnp.arange(NARROW) < rows.top_k[:, None], value, 0)
    # Logits that differ may have one likelihood, so in that order tokens may stand otherwise.
    mass_before = jnp.where(_are_before(value, token), in_k[:, None], 0).sum(-1)
    k_is_inside = rows.top_k <= NARROW
    mass = jnp.where(k_is_inside, in_k.sum(-1), likelihood.sum((-2, -1)))
    in_p = mass_before < _mass_target(rows.top_p, mass)[:, None]
    is_kept = (in_k > 0) & in_p & (value >= rows.min_p[:, None])
    # Enough if the survivors end above the least candidate: then none of its equals outside the
    # candidates could have been kept. And top_p needs to know the mass that top_k left.
    least_kept = jnp.where(is_kept, value, jnp.inf).min(-1)
    knows_mass = k_is_inside | (rows.top_k == ALL) | (rows.top_p >= 1)
    suffices = (least_kept > value.min(-1)) & knows_mass

    weight = jnp.where(is_kept, value, 0)
    # Mass of the survivors with lower ids: the order in which the wide way sums too.
    mass_below = jnp.where(token[:, None] < token[..., None], weight[:, None], 0).sum(-1)
    is_reached = is_kept & (mass_below <= (chance * weight.sum(-1))[:, None])
    # The chosen one is the last that is reached, and the first always is.
    return jnp.where(is_reached, token, -1).max(-1), suffices


def _are_before(
    value: Float[Array, "rows tokens"], token: Int32[Array, "rows tokens"]
) -> Bool[Array, "rows tokens tokens"]:
    """Whether token j is higher than token i, or tied and the lower id: at [row, i, j]."""
    is_tied_before = (value[:, None] == value[..., None]) & (token[:, None] < token[..., None])
    return (value[:, None] > value[..., None]) | is_tied_before


def truncate(
    blocks: Float[Array, "rows blocks block"],
    likelihood: Float[Array, "rows blocks block"],
    rows: SamplingRows,
) -> Float[Array, "rows blocks block"]:
    """The wide way: the likelihoods with everything but the survivors at zero."""
    kept = lax.cond(
        (rows.top_k < ALL).any(),
        lambda: jnp.where(_prefix(blocks, 1.0, rows.top_k.astype(jnp.float32)), likelihood, 0),
        lambda: likelihood,
    )
    kept = lax.cond(
        (rows.top_p < 1).any(),
        lambda: jnp.where(
            _prefix(kept, kept, _mass_target(rows.top_p, kept.sum((-2, -1)))), kept, 0
        ),
        lambda: kept,
    )
    return jnp.where(kept >= rows.min_p[:, None, None], kept, 0)


def _mass_target(
    top_p: Float[Array, " rows"], mass: Float[Array, " rows"]
) -> Float[Array, " rows"]:
    """The mass at which top_p stops keeping; a top_p of 1 keeps all, whatever rounding says.

    Never 0, which would be reached by keeping nothing: the least top_p are 0 in float32.
    """
    return jnp.where(top_p < 1, jnp.maximum(top_p * mass, LEAST_MASS), jnp.inf)


def _prefix(
    value: Float[Array, "rows blocks block"],
    weight: Float[Array, "rows blocks block"] | float,
    target: Float[Array, " rows"],
) -> Bool[Array, "rows blocks block"]:
    """The first tokens whose weight reaches the target, the one that reaches it included.

    The highest value comes first, the lowest id on ties. The border is found by bisection over all
    numbers of float32, so it is exact.

    Args:
      value: Of each token.
      weight: Of each token.
      target: The weight at which to stop; more than 0.
    """

    def halve(
        _: Int32[Array, ""], bounds: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the weight at or above low reaches the target, at or above high not
        middle = (low & high) + ((low ^ high) >> 1)  # their sum may not fit
        least = _of_rank(middle)[:, None, None]
        reaches = folded_sum(jnp.where(value >= least, weight, 0)) >= target
        return jnp.where(reaches, middle, low), jnp.where(reaches, high, middle)

    every = jnp.zeros(value.shape[0], jnp.int32)
    border, _ = lax.fori_loop(0, 32, halve, (every + _LEAST_RANK, every + _INFINITY))
    border = _of_rank(border)[:, None, None]

    is_tied = value == border
    # What the tied may still add, and the one block in which they reach it: all before it are
    # kept, none after it.
    rest = target - folded_sum(jnp.where(value > border, weight, 0))
    tied = jnp.where(is_tied, weight, 0)
    block_before = sums_before(tied.sum(-1))
    last = jnp.maximum((block_before < rest[:, None]).sum(-1) - 1, 0)[:, None]
    in_last = jnp.take_along_axis(tied, last[..., None], axis=1)[:, 0]
    before = jnp.take_along_axis(block_before, last, axis=1) + sums_before(in_last)
    block = jnp.arange(value.shape[1])
    is_kept_tie = (block < last)[..., None] | (
        (block == last)[..., None] & (before < rest[:, None])[:, None]
    )
    return (value > border) | (is_tied & is_kept_tie)


# The bits of floats, as integers, order as the floats do; those of negative ones the other way
# round, which flipping all but the sign mends.
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_LEAST_RANK = -_INFINITY - 1  # that of -inf


def _of_rank(rank: Int32[Array, " rows"]) -> Float[Array, " rows"]:
    """The float32 of a rank in ascending order."""
    bits = jnp.where(rank < 0, rank ^ _MAGNITUDE, rank)
    return lax.bitcast_convert_type(bits, jnp.float32)

"""Choosing the next token on the device: greedy, or a draw from a truncated distribution.

The order is temperature, top-k, top-p (renormalised after top-k), min-p. Each of the three keeps a
prefix of the tokens in descending order of likelihood, ties at the border by lowest id, so the
survivors are a prefix too. One uniform number then picks the survivor at which the cumulative
mass, summed in order of ids, exceeds it.

Two ways find the survivors, and each row's own values decide which it takes, so a token does not
depend on batch-mates:
* narrow: the most likely tokens, taken from the blocks with the highest maxima; enough when the
  survivors end inside them. No pass over the vocabulary but one for its mass.
* wide: a threshold found by bisection over the float's bits, exact, for rows where they do not.
Rules that no row of the batch uses are skipped. Nothing is sorted or scanned: counting and small
triangular products do the same on a few hundred values, and compile in a fraction of the time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int32, UInt32

BLOCK = 64  # vocabulary entries per block
NARROW = 64  # candidates of the narrow way
GROUP = 4  # rows that go the wide way together
FOLD = 8  # parts of the vocabulary that are added before they are summed
LEAST_MASS = 1e-30  # less than any token's that could be drawn


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
    """

    temperature: Float[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    seed: UInt32[Array, "rows 2"]
    position: Int32[Array, " rows"]


def sample(logits: Float[Array, "rows vocab"], rows: SamplingRows) -> Int32[Array, " rows"]:
    """The next token of each row.

    A row's token depends on its own logits, parameters, seed and position only. Where its logits
    hold NaN or infinities it is of no meaning, but still an id of the vocabulary.
    """
    blocks = _blocks(logits)
    block_high = blocks.max(-1)
    greedy = _greedy(blocks, block_high)
    is_drawn = rows.temperature > 0
    token = lax.cond(
        is_drawn.any(),
        lambda: jnp.where(is_drawn, _draw(blocks, block_high, rows), greedy),
        lambda: greedy,
    )
    return jnp.clip(token, 0, logits.shape[1] - 1)


def uniform(
    seed: UInt32[Array, "rows 2"], position: Int32[Array, " rows"]
) -> Float[Array, " rows"]:
    """The number in [0, 1) that decides a row's token: a function of its seed and position alone.

    Threefry-2x32 with the seed as key and (position, choice) as counter; its first word's upper 24
    bits. There is one choice yet, number 0. Source: https://doi.org/10.1145/2063384.2063405.
    """
    counter = jnp.stack([position.astype(jnp.uint32), jnp.zeros_like(seed[:, 0])], axis=-1)
    bits = jax.vmap(threefry_2x32)((seed[:, 0], seed[:, 1]), counter)[:, 0]
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def chosen_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int32[Array, " rows"]
) -> Float[Array, " rows"]:
    """Log-probability of each row's token under the raw distribution, before any rule."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _blocks(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows blocks block"]:
    """Logits in blocks, a multiple of FOLD of them; the last are filled up with -inf."""
    # Behind a barrier the head's product is not fused into each pass over its result.
    logits = lax.optimization_barrier(logits)
    rows, vocab = logits.shape
    padding = -vocab % (BLOCK * FOLD)
    padded = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return padded.reshape(rows, -1, BLOCK)


def _greedy(
    blocks: Float[Array, "rows blocks block"], block_high: Float[Array, "rows blocks"]
) -> Int32[Array, " rows"]:
    """Argmax in two stages, lowest id on ties: 20 times faster on the CPU than in one."""
    best = jnp.argmax(block_high, axis=-1)
    within = jnp.take_along_axis(blocks, best[:, None, None], axis=1)[:, 0]
    return (best * BLOCK + jnp.argmax(within, axis=-1)).astype(jnp.int32)


def _draw(
    blocks: Float[Array, "rows blocks block"],
    block_high: Float[Array, "rows blocks"],
    rows: SamplingRows,
) -> Int32[Array, " rows"]:
    vocab = blocks.shape[1] * BLOCK
    is_drawn = rows.temperature > 0
    temperature = jnp.where(is_drawn, rows.temperature, 1.0)
    # Likelihoods relative to the most likely token: in [0, 1], no overflow at any temperature.
    relative = blocks - block_high.max(-1)[:, None, None]
    likelihood = lax.optimization_barrier(jnp.exp(relative / temperature[:, None, None]))
    top_k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    is_truncated = is_drawn & ((top_k < vocab) | (rows.top_p < 1) | (rows.min_p > 0))
    is_whole = is_drawn & ~is_truncated
    chance = uniform(rows.seed, rows.position)

    token, suffices = _draw_narrow(likelihood, block_high, top_k, rows, chance)
    token = lax.cond(
        is_whole.any(),
        lambda: jnp.where(is_whole, _inverse(likelihood, chance), token),
        lambda: token,
    )

    def draw_wide(wide: Int32[Array, " group"], token: jax.Array) -> jax.Array:
        kept = _truncate(likelihood[wide], top_k[wide], rows.top_p[wide], rows.min_p[wide])
        return token.at[wide].set(_inverse(kept, chance[wide]), mode="drop")

    return _for_groups(is_truncated & ~suffices, draw_wide, token)


def _for_groups(
    is_chosen: Bool[Array, " rows"],
    run: Callable[[Int32[Array, " group"], jax.Array], jax.Array],
    carry: jax.Array,
) -> jax.Array:
    """Runs `run(row numbers, carry)` over the chosen rows, GROUP at a time.

    So the cost follows the rows that are chosen. Numbers past the rows are padding: a gather reads
    the last row for them, and a scatter drops them.
    """
    num_rows = is_chosen.shape[0]
    row = jnp.arange(num_rows)
    place = (is_chosen & (row < row[:, None])).sum(-1)  # how many chosen rows come before
    chosen = jnp.full(num_rows + GROUP, num_rows, jnp.int32)
    chosen = chosen.at[jnp.where(is_chosen, place, num_rows + GROUP)].set(row, mode="drop")

    def run_group(index: Int32[Array, ""], carry: jax.Array) -> jax.Array:
        return run(lax.dynamic_slice_in_dim(chosen, index * GROUP, GROUP), carry)

    return lax.fori_loop(0, (is_chosen.sum() + GROUP - 1) // GROUP, run_group, carry)


def _draw_narrow(
    likelihood: Float[Array, "rows blocks block"],
    block_high: Float[Array, "rows blocks"],
    top_k: Int32[Array, " rows"],
    rows: SamplingRows,
    chance: Float[Array, " rows"],
) -> tuple[Int32[Array, " rows"], Bool[Array, " rows"]]:
    """A draw among the NARROW most likely tokens, and whether all survivors are among them."""
    num_rows, num_blocks, _ = likelihood.shape
    # Any NARROW highest tokens lie in the NARROW blocks with the highest maxima.
    _, block = lax.top_k(block_high, min(NARROW, num_blocks))
    candidates = jnp.take_along_axis(likelihood, block[..., None], axis=1)
    value, place = lax.top_k(candidates.reshape(num_rows, -1), NARROW)
    token = jnp.take_along_axis(block, place // BLOCK, axis=1) * BLOCK + place % BLOCK

    # Order by value, then by id: candidate j comes before candidate i.
    is_tied_before = (value[:, None] == value[..., None]) & (token[:, None] < token[..., None])
    is_before = (value[:, None] > value[..., None]) | is_tied_before
    rank = is_before.sum(-1)
    in_k = jnp.where(rank < top_k[:, None], value, 0)
    mass_before = jnp.where(is_before, in_k[:, None], 0).sum(-1)
    k_is_inside = top_k <= NARROW
    mass = jnp.where(k_is_inside, in_k.sum(-1), likelihood.sum((-2, -1)))
    in_p = mass_before < _mass_target(rows.top_p, mass)[:, None]
    is_kept = (rank == 0) | ((in_k > 0) & in_p & (value >= rows.min_p[:, None]))
    # Enough if the survivors end above the least candidate: then none of its equals outside the
    # candidates could have been kept. And top_p needs to know the mass that top_k left.
    least_kept = jnp.where(is_kept, value, jnp.inf).min(-1)
    knows_mass = k_is_inside | (top_k >= num_blocks * BLOCK) | (rows.top_p >= 1)
    suffices = (least_kept > value.min(-1)) & knows_mass

    weight = jnp.where(is_kept, value, 0)
    # Mass of the survivors with lower ids: the order in which the wide way sums too.
    mass_below = jnp.where(token[:, None] < token[..., None], weight[:, None], 0).sum(-1)
    is_reached = is_kept & (mass_below <= (chance * weight.sum(-1))[:, None])
    # The chosen one is the last that is reached, and the first always is.
    return jnp.where(is_reached, token, -1).max(-1).astype(jnp.int32), suffices


def _mass_target(
    top_p: Float[Array, " rows"], mass: Float[Array, " rows"]
) -> Float[Array, " rows"]:
    """The mass at which top_p stops keeping; a top_p of 1 keeps all, whatever rounding says.

    Never 0, which would be reached by keeping nothing: the least top_p are 0 in float32.
    """
    return jnp.where(top_p < 1, jnp.maximum(top_p * mass, LEAST_MASS), jnp.inf)


def _truncate(
    likelihood: Float[Array, "rows blocks block"],
    top_k: Int32[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
) -> Float[Array, "rows blocks block"]:
    """The likelihoods with everything but the survivors at zero."""
    vocab = likelihood.shape[1] * BLOCK
    kept = lax.cond(
        (top_k < vocab).any(),
        lambda: _keep_prefix(likelihood, jnp.ones_like, top_k.astype(jnp.float32)),
        lambda: likelihood,
    )
    kept = _keep_prefix(kept, lambda value: value, _mass_target(top_p, kept.sum((-2, -1))))
    return jnp.where(kept >= min_p[:, None, None], kept, 0)


def _keep_prefix(
    value: Float[Array, "rows blocks block"],
    weigh: Callable[[Float[Array, "rows blocks block"]], Float[Array, "rows blocks block"]],
    target: Float[Array, " rows"],
) -> Float[Array, "rows blocks block"]:
    """Keeps tokens until their weight reaches the target: highest first, lowest id first on ties.

    The token that reaches it is kept. The border is found by bisection over the bits of the value:
    those of non-negative floats order as the floats do, so 31 halvings are exact.

    Args:
      value: Orders the tokens; in [0, 1].
      weigh: The weight of tokens of these values.
      target: The weight at which to stop.
    """

    def halve(
        _: Int32[Array, ""], bounds: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the weight at or above low reaches the target, at or above high not
        middle = low + (high - low) // 2
        # Floats compare as their bits do, and faster.
        least = lax.bitcast_convert_type(middle, jnp.float32)[:, None, None]
        reaches = _folded_sum(jnp.where(value >= least, weigh(value), 0)) >= target
        return jnp.where(reaches, middle, low), jnp.where(reaches, high, middle)

    rows = value.shape[0]
    above_one = lax.bitcast_convert_type(jnp.float32(1.5), jnp.int32)  # no likelihood exceeds 1
    border, _ = lax.fori_loop(0, 31, halve, (jnp.zeros(rows, jnp.int32), jnp.full(rows, above_one)))
    border = lax.bitcast_convert_type(border, jnp.float32)[:, None, None]

    is_tied = value == border
    # What the tied may still add, and the one block in which they reach it: all before it are
    # kept, none after it.
    rest = target - _folded_sum(jnp.where(value > border, weigh(value), 0))
    tied = jnp.where(is_tied, weigh(value), 0)
    block_before = _sums_before(tied.sum(-1))
    last = jnp.maximum((block_before < rest[:, None]).sum(-1) - 1, 0)[:, None]
    in_last = jnp.take_along_axis(tied, last[..., None], axis=1)[:, 0]
    before = jnp.take_along_axis(block_before, last, axis=1) + _sums_before(in_last)
    block = jnp.arange(value.shape[1])
    is_kept_tie = (block < last)[..., None] | (
        (block == last)[..., None] & (before < rest[:, None])[:, None]
    )
    return jnp.where((value > border) | (is_tied & is_kept_tie), value, 0)


def _folded_sum(x: Float[Array, "rows blocks block"]) -> Float[Array, " rows"]:
    """The sum of each row, three times as fast on the CPU as a plain sum of a computed array.

    XLA's CPU code adds a fused sum number by number, in order. Adding FOLD parts of the array is
    elementwise, so it is vectorised with whatever computes x, and leaves little to sum.
    """
    rows, blocks, block = x.shape
    parts = x.reshape(rows, FOLD, blocks // FOLD, block)
    folded = parts[:, 0]
    for part in range(1, FOLD):
        folded = folded + parts[:, part]
    return lax.optimization_barrier(folded).sum((-2, -1))


def _inverse(
    weight: Float[Array, "rows blocks block"], chance: Float[Array, " rows"]
) -> Int32[Array, " rows"]:
    """The token at which the mass, summed in order of ids, exceeds chance times the whole."""
    block_mass = weight.sum(-1)
    block_before = _sums_before(block_mass)
    target = (chance * block_mass.sum(-1))[:, None]
    block = _last_reached(block_before, block_mass, target)[:, None]
    inside = jnp.take_along_axis(weight, block[..., None], axis=1)[:, 0]
    before = jnp.take_along_axis(block_before, block, axis=1) + _sums_before(inside)
    return (block[:, 0] * BLOCK + _last_reached(before, inside, target)).astype(jnp.int32)


def _last_reached(
    before: Float[Array, "rows places"],
    mass: Float[Array, "rows places"],
    target: Float[Array, "rows 1"],
) -> Int32[Array, " rows"]:
    """The last place that has mass and begins at or before the target; the first, if none does."""
    has_mass = mass > 0
    place = jnp.arange(mass.shape[1])
    first = jnp.where(has_mass, place, mass.shape[1] - 1).min(-1)
    reached = jnp.where(has_mass & (before <= target), place, -1).max(-1)
    return jnp.maximum(reached, first).astype(jnp.int32)


def _sums_before(x: Float[Array, "rows places"]) -> Float[Array, "rows places"]:
    """For each place the sum of all before it. Places are a multiple of FOLD."""
    rows, places = x.shape
    parts = x.reshape(rows, FOLD, places // FOLD)
    within = _triangle_sums(parts)
    return (within + _triangle_sums(parts.sum(-1))[..., None]).reshape(rows, places)


def _triangle_sums(x: Float[Array, "*rows places"]) -> Float[Array, "*rows places"]:
    """The same for few places, as a product with a triangle of ones."""
    place = jnp.arange(x.shape[-1])
    triangle = (place[:, None] < place).astype(x.dtype)
    return jnp.dot(x, triangle, precision=lax.Precision.HIGHEST)

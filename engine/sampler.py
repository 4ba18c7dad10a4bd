"""Choosing the next token on the device: greedy, or a draw from a truncated distribution.

A row's own rules (engine.logit_rules) change its logits first. Then the order is temperature,
top-k, top-p (renormalised after top-k), min-p. Each of the three keeps a
prefix of the tokens in descending order of likelihood, ties at the border by lowest id, so the
survivors are a prefix too. One uniform number then picks the survivor at which the cumulative
mass, summed in order of ids, exceeds it.

Two ways find the survivors, and each row's own values decide which it takes, so a token does not
depend on batch-mates:
* narrow: the most likely tokens, taken from the blocks with the highest maxima; enough when the
  survivors end inside them. No pass over the vocabulary but one for its mass.
* wide: a threshold found by bisection over the float's bits, exact, for rows where they do not,
  and for rows with rules. A few rows at a time, so that others pay nothing for them.
Rules that no row of the batch uses are skipped. Nothing is sorted or scanned: counting and small
triangular products do the same on a few hundred values, and compile in a fraction of the time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int32, UInt32

from .logit_rules import LogitRules, RuleTables, apply_rules
from .row_groups import for_groups, take_rows

BLOCK = 64  # vocabulary entries per block
NARROW = 64  # candidates of the narrow way
GROUP = 4  # rows that go the wide way together
FOLD = 8  # parts of the vocabulary that are added before they are summed
LEAST_MASS = 1e-30  # less than any token's that could be drawn
LEAST_LOGPROB = -9999.0  # stands for all that is less, so that what is reported is finite


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

    def take(self, rows: Int32[Array, " some"]) -> "SamplingRows":
        """Some rows; a number past them reads the last."""
        return take_rows(self, rows)


class Samples(NamedTuple):
    """The next token of each row.

    Attributes:
      token: Its id.
      is_broken: It means nothing: the model's logits hold NaN or infinity, or no id is left that
        may come.
    """

    token: Int32[Array, " rows"]
    is_broken: Bool[Array, " rows"]


def sample(
    logits: Float[Array, "rows vocab"], rows: SamplingRows, rules: LogitRules, tables: RuleTables
) -> Samples:
    """The next token of each row.

    A row's token depends on its own logits, parameters, rules, seed, choice and position only.
    Every token is an id of the vocabulary, one that means nothing too.
    """
    # Behind a barrier the head's product is not fused into each pass over its result.
    logits = lax.optimization_barrier(logits)
    blocks = _blocks(logits)
    block_high = blocks.max(-1)
    greedy = _greedy(blocks, block_high)
    is_drawn = (rows.temperature > 0) & ~rules.is_used
    token, suffices = lax.cond(
        is_drawn.any(),
        lambda: _draw(blocks, block_high, rows, is_drawn, greedy),
        lambda: (greedy, jnp.ones_like(is_drawn)),
    )

    def sample_wide(wide: Int32[Array, " group"], samples: Samples) -> Samples:
        its_logits, its_rules = logits[wide], rules.take(wide)
        its_logits = lax.cond(
            its_rules.is_used.any(),
            lambda: apply_rules(its_logits, its_rules, tables),
            lambda: its_logits,
        )
        found = _sample_wide(its_logits, rows.take(wide))
        return Samples(
            samples.token.at[wide].set(found.token, mode="drop"),
            samples.is_broken.at[wide].max(found.is_broken, mode="drop"),
        )

    samples = Samples(token, _is_broken(blocks, block_high))
    samples = for_groups(rules.is_used | ~suffices, GROUP, sample_wide, samples)
    return Samples(jnp.clip(samples.token, 0, logits.shape[1] - 1), samples.is_broken)


def uniform(
    seed: UInt32[Array, "rows 2"], position: Int32[Array, " rows"], choice: Int32[Array, " rows"]
) -> Float[Array, " rows"]:
    """The number in [0, 1) that decides a row's token: a function of these three alone.

    Threefry-2x32 with the seed as key and (position, choice) as counter; its first word's upper 24
    bits. Source: https://doi.org/10.1145/2063384.2063405.
    """
    counter = jnp.stack([position, choice], axis=-1).astype(jnp.uint32)
    bits = jax.vmap(threefry_2x32)((seed[:, 0], seed[:, 1]), counter)[:, 0]
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def chosen_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int32[Array, " rows"]
) -> Float[Array, " rows"]:
    """Log-probability of each row's token under the model's distribution, before any rule."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return jnp.maximum(chosen - jax.nn.logsumexp(logits, axis=-1), LEAST_LOGPROB)


def top_logprobs(
    logits: Float[Array, "rows vocab"], count: int
) -> tuple[Int32[Array, "rows count"], Float[Array, "rows count"]]:
    """The `count` most likely ids under the same distribution, the lowest id on ties, and theirs.

    A smaller vocabulary is filled up with id 0 and the least log-probability.
    """
    # top_k takes -0 for less than 0.
    blocks = _blocks(jnp.where(logits == 0, 0, logits))
    num_rows, num_blocks, _ = blocks.shape
    # Any `count` highest lie in the `count` blocks with the highest maxima; in order of ids, so
    # that ties go to the lowest.
    _, block = lax.top_k(blocks.max(-1), min(count, num_blocks))
    block = jnp.sort(block, axis=-1)
    candidates = jnp.take_along_axis(blocks, block[..., None], axis=1).reshape(num_rows, -1)
    value, place = lax.top_k(candidates, count)
    token = jnp.take_along_axis(block, place // BLOCK, axis=1) * BLOCK + place % BLOCK
    logprob = jnp.maximum(value - jax.nn.logsumexp(logits, axis=-1)[:, None], LEAST_LOGPROB)
    return jnp.where(token < logits.shape[1], token, 0).astype(jnp.int32), logprob


def _blocks(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows blocks block"]:
    """Logits in blocks, a multiple of FOLD of them; the last are filled up with -inf."""
    rows, vocab = logits.shape
    padding = -vocab % (BLOCK * FOLD)
    padded = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return padded.reshape(rows, -1, BLOCK)


def _is_broken(
    blocks: Float[Array, "rows blocks block"], block_high: Float[Array, "rows blocks"]
) -> Bool[Array, " rows"]:
    """Rows with NaN or infinity, or with nothing but -inf.

    XLA's CPU code forgets a NaN when it takes the maximum of eight rows and more.
    """
    return jnp.isnan(blocks).any((-2, -1)) | ~jnp.isfinite(block_high.max(-1))


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
    is_drawn: Bool[Array, " rows"],
    token: Int32[Array, " rows"],
) -> tuple[Int32[Array, " rows"], Bool[Array, " rows"]]:
    """Tokens of the rows that are drawn, in place of `token`; and False where only the wide way is.

    Neither way but for rows that are drawn, and True for the others.
    """
    likelihood = _likelihood(blocks, block_high, rows.temperature)
    top_k = _top_k(blocks, rows.top_k)
    is_truncated = is_drawn & _is_truncated(blocks, rows)
    is_whole = is_drawn & ~is_truncated
    chance = uniform(rows.seed, rows.position, rows.choice)
    drawn, suffices = _draw_narrow(likelihood, block_high, top_k, rows, chance)
    token = jnp.where(is_truncated & suffices, drawn, token)
    token = lax.cond(
        is_whole.any(),
        lambda: jnp.where(is_whole, _inverse(likelihood, chance), token),
        lambda: token,
    )
    return token, ~is_truncated | suffices


def _sample_wide(logits: Float[Array, "rows vocab"], rows: SamplingRows) -> Samples:
    """Samples a few rows whatever their logits and parameters are."""
    blocks = _blocks(logits)
    block_high = blocks.max(-1)
    likelihood = _likelihood(blocks, block_high, rows.temperature)
    kept = lax.cond(
        _is_truncated(blocks, rows).any(),
        lambda: _truncate(likelihood, _top_k(blocks, rows.top_k), rows.top_p, rows.min_p),
        lambda: likelihood,
    )
    drawn = _inverse(kept, uniform(rows.seed, rows.position, rows.choice))
    token = jnp.where(rows.temperature > 0, drawn, _greedy(blocks, block_high))
    return Samples(token, _is_broken(blocks, block_high))


def _likelihood(
    blocks: Float[Array, "rows blocks block"],
    block_high: Float[Array, "rows blocks"],
    temperature: Float[Array, " rows"],
) -> Float[Array, "rows blocks block"]:
    """Likelihoods relative to the most likely token: in [0, 1], no overflow at any temperature."""
    divisor = jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    relative = blocks - block_high.max(-1)[:, None, None]
    return lax.optimization_barrier(jnp.exp(relative / divisor))


def _top_k(
    blocks: Float[Array, "rows blocks block"], top_k: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """Tokens to keep, at most all."""
    most = blocks.shape[1] * BLOCK
    return jnp.where(top_k > 0, jnp.minimum(top_k, most), most)


def _is_truncated(
    blocks: Float[Array, "rows blocks block"], rows: SamplingRows
) -> Bool[Array, " rows"]:
    is_cut = _top_k(blocks, rows.top_k) < blocks.shape[1] * BLOCK
    return is_cut | (rows.top_p < 1) | (rows.min_p > 0)


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

"""Choosing the next token on the device: greedy, or a draw from a truncated distribution.

A row's own rules (engine.logit_rules) change its logits first. Then the order is temperature,
top-k, top-p (renormalised after top-k), min-p: see engine.truncation. One uniform number then picks
the survivor at which the cumulative mass, summed in order of ids, exceeds it.

Two ways find the survivors, and each row's own values decide which it takes, so a token does not
depend on batch-mates:
* narrow: the most likely tokens, taken from the blocks with the highest maxima; enough when the
  survivors end inside them. No pass over the vocabulary but one for its mass.
* wide: a border found by bisection, exact, for rows where they do not, and for rows with rules. A
  few rows at a time, so that others pay nothing for them.
Rules that no row of the batch uses are skipped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int32, UInt32

from .logit_rules import LogitRules, RuleTables, apply_rules
from .row_groups import for_groups, read_wide_rows
from .sampling_rows import SamplingRows
from .truncation import draw_narrow, truncate
from .vocabulary_blocks import highest, in_blocks, inverse

GROUP = 4  # rows that go the wide way together


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
    rows = rows.for_vocabulary(logits.shape[1])
    blocks = in_blocks(logits)
    block_high = blocks.max(-1)
    greedy = highest(blocks, block_high)
    is_drawn = (rows.temperature > 0) & ~rules.is_used
    token, suffices = lax.cond(
        is_drawn.any(),
        lambda: _draw(blocks, block_high, rows, is_drawn, greedy),
        lambda: (greedy, jnp.ones_like(is_drawn)),
    )

    def sample_wide(wide: Int32[Array, " group"], samples: Samples) -> Samples:
        its_logits, its_rules = read_wide_rows(logits, wide), rules.take(wide)
        its_logits = lax.cond(
            its_rules.is_used.any(),
            lambda: apply_rules(its_logits, its_rules, tables),
            lambda: its_logits,
        )
        found = _sample_wide(its_logits, rows.take(wide))
        return Samples(
            samples.token.at[wide].set(found.token, mode="drop", unique_indices=True),
            # Rules may hide that the model's logits are none.
            samples.is_broken.at[wide].max(found.is_broken, mode="drop", unique_indices=True),
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


def _is_broken(
    blocks: Float[Array, "rows blocks block"], block_high: Float[Array, "rows blocks"]
) -> Bool[Array, " rows"]:
    """Rows with NaN or infinity, or with nothing but -inf.

    XLA's CPU code forgets a NaN when it takes the maximum of eight rows and more.
    """
    return jnp.isnan(blocks).any((-2, -1)) | ~jnp.isfinite(block_high.max(-1))


def _draw(
    blocks: Float[Array, "rows blocks block"],
    block_high: Float[Array, "rows blocks"],
    rows: SamplingRows,
    is_drawn: Bool[Array, " rows"],
    token: Int32[Array, " rows"],
) -> tuple[Int32[Array, " rows"], Bool[Array, " rows"]]:
    """Draws what can be without the wide way: the tokens, and False for rows that need that.

    A row that needs it, or is not drawn, keeps its `token`.
    """
    likelihood = _likelihood(blocks, block_high, rows.temperature)
    is_truncated = is_drawn & rows.is_truncated
    is_whole = is_drawn & ~is_truncated
    chance = uniform(rows.seed, rows.position, rows.choice)
    drawn, suffices = lax.cond(
        is_truncated.any(),
        lambda: draw_narrow(blocks, block_high, likelihood, rows, chance),
        lambda: (token, ~is_truncated),
    )
    token = jnp.where(is_truncated & suffices, drawn, token)
    token = lax.cond(
        is_whole.any(),
        lambda: jnp.where(is_whole, inverse(likelihood, chance), token),
        lambda: token,
    )
    return token, ~is_truncated | suffices


def _sample_wide(logits: Float[Array, "rows vocab"], rows: SamplingRows) -> Samples:
    """Samples a few rows whatever their logits and parameters are."""
    blocks = in_blocks(logits)
    block_high = blocks.max(-1)
    likelihood = _likelihood(blocks, block_high, rows.temperature)
    kept = lax.cond(
        rows.is_truncated.any(),
        lambda: truncate(blocks, likelihood, rows),
        lambda: likelihood,
    )
    drawn = inverse(kept, uniform(rows.seed, rows.position, rows.choice))
    token = jnp.where(rows.temperature > 0, drawn, highest(blocks, block_high))
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

"""What a request's own rules do to the model's logits before anything is drawn.

In this order: repetition penalty, frequency and presence penalty, bias, and then ids that must not
come are ruled out. Whether a rule applies is a value in a row, never a shape, so that any mix of
requests shares one executable.

Sources: the repetition penalty is that of https://arxiv.org/abs/1909.05858, section 4.1; frequency
and presence penalty are those of OpenAI's API.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int16, Int32

from .packing import COUNT_SHIFT
from .row_groups import read_wide_rows, take_rows
from .token_masks import WORD_BITS, num_words


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RuleTables:
    """What rules look up, per slot. On the device from step to step.

    Attributes:
      counts: Of each id, as engine.packing has them. Of requests with penalties only; else stale.
      bias_ids, bias: Ids with a bias, all different, and the biases; columns past
        LogitRules.num_biased are stale.
      masks: Ids that may come next, as engine.token_masks has them. Of masked requests only.
    """

    counts: Int16[Array, "slots vocab"]
    bias_ids: Int32[Array, "slots biases"]
    bias: Float32[Array, "slots biases"]
    masks: Int32[Array, "slots words"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitRules:
    """Which rules each row has.

    Attributes:
      slot: Row of the tables.
      repetition_penalty: 1: none.
      frequency_penalty, presence_penalty: 0: none.
      num_biased: How many columns of the bias tables count.
      is_masked: Whether the mask counts.
      not_yet: Ids that are ruled out for now, all different; negative: none.
    """

    slot: Int32[Array, " rows"]
    repetition_penalty: Float[Array, " rows"]
    frequency_penalty: Float[Array, " rows"]
    presence_penalty: Float[Array, " rows"]
    num_biased: Int32[Array, " rows"]
    is_masked: Bool[Array, " rows"]
    not_yet: Int32[Array, "rows ids"]

    @property
    def has_penalties(self) -> Bool[Array, " rows"]:
        """Rows whose history counts."""
        return (
            (self.repetition_penalty != 1)
            | (self.frequency_penalty != 0)
            | (self.presence_penalty != 0)
        )

    @property
    def is_used(self) -> Bool[Array, " rows"]:
        """Rows that any rule touches."""
        is_waiting = (self.not_yet >= 0).any(-1)
        return self.has_penalties | (self.num_biased > 0) | self.is_masked | is_waiting

    def take(self, rows: Int32[Array, " some"]) -> "LogitRules":
        """The rules of some rows; a number past them reads the last."""
        return take_rows(self, rows)


def empty_tables(num_slots: int, vocab_size: int, max_biases: int) -> RuleTables:
    """Tables that nobody uses."""
    return RuleTables(
        counts=jnp.zeros((num_slots, vocab_size), jnp.int16),
        bias_ids=jnp.zeros((num_slots, max_biases), jnp.int32),
        bias=jnp.zeros((num_slots, max_biases), jnp.float32),
        masks=jnp.zeros((num_slots, num_words(vocab_size)), jnp.int32),
    )


def apply_rules(
    logits: Float[Array, "rows vocab"], rules: LogitRules, tables: RuleTables
) -> Float[Array, "rows vocab"]:
    """The logits after all rules; -inf where an id is ruled out. What no row has costs nothing."""
    logits = lax.cond(
        rules.has_penalties.any(),
        lambda: _penalise(logits, rules, read_wide_rows(tables.counts, rules.slot)),
        lambda: logits,
    )
    logits = lax.cond(
        (rules.num_biased > 0).any(), lambda: _bias(logits, rules, tables), lambda: logits
    )
    logits = lax.cond(
        rules.is_masked.any(),
        lambda: _mask(logits, rules.is_masked, read_wide_rows(tables.masks, rules.slot)),
        lambda: logits,
    )
    return _scatter(logits, rules.not_yet, rules.not_yet >= 0, -jnp.inf)


def _penalise(
    logits: Float[Array, "rows vocab"], rules: LogitRules, counts: Int16[Array, "rows vocab"]
) -> Float[Array, "rows vocab"]:
    has_penalties = rules.has_penalties[:, None]  # the counts of other rows are stale
    repetition = rules.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    changed = jnp.where(counts != 0, repeated, logits)
    in_output = (counts >> COUNT_SHIFT).astype(jnp.float32)
    changed = changed - rules.frequency_penalty[:, None] * in_output
    changed = changed - jnp.where(in_output > 0, rules.presence_penalty[:, None], 0)
    return jnp.where(has_penalties, changed, logits)


def _bias(
    logits: Float[Array, "rows vocab"], rules: LogitRules, tables: RuleTables
) -> Float[Array, "rows vocab"]:
    ids, bias = tables.bias_ids[rules.slot], tables.bias[rules.slot]
    counts = jnp.arange(ids.shape[1]) < rules.num_biased[:, None]
    old = jnp.take_along_axis(logits, ids, axis=1)
    return _scatter(logits, ids, counts, old + bias)


def _mask(
    logits: Float[Array, "rows vocab"],
    is_masked: Bool[Array, " rows"],
    masks: Int32[Array, "rows words"],
) -> Float[Array, "rows vocab"]:
    bits = (masks[:, :, None] >> jnp.arange(WORD_BITS)) & 1
    may_come = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]] == 1
    return jnp.where(may_come | ~is_masked[:, None], logits, -jnp.inf)


def _scatter(
    logits: Float[Array, "rows vocab"],
    ids: Int32[Array, "rows ids"],
    is_valid: Bool[Array, "rows ids"],
    value: jax.Array | float,
) -> Float[Array, "rows vocab"]:
    """Sets logits at ids, where that is valid; those of a row are all different."""
    row = jnp.arange(logits.shape[0])[:, None]
    # Past the vocabulary, where a scatter drops it, and no two at one place.
    place = jnp.where(is_valid, ids, logits.shape[1] + jnp.arange(ids.shape[1]))
    return logits.at[row, place].set(value, mode="drop", unique_indices=True)

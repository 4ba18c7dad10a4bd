"""What lives on the device between steps: the KV pages, and a row and a page table per slot.

The whole is one pytree that each step takes, donates and returns. Slot rows are integers in the
columns of engine.packing, floats as their bits: one scatter inserts a request and one gather reads
a row, whatever it holds.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from ..pallas_kernels.backend import KVLayer
from . import packing
from .logit_rules import RuleTables
from .row_groups import for_groups


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """State of the requests that hold a slot.

    Attributes:
      rows: A row per slot, in the columns of engine.packing; zeros where nobody ever was.
      page_table: Pages of each slot's request, in order; entries past its length are stale.
    """

    rows: Int32[Array, "slots columns"]
    page_table: Int32[Array, "slots pages_per_seq"]

    def column(self, index: int) -> Int32[Array, " slots"]:
        """One integer column."""
        return self.rows[:, index]

    def float_column(self, index: int) -> Float[Array, " slots"]:
        """One column that holds the bits of floats."""
        return lax.bitcast_convert_type(self.rows[:, index], jnp.float32)

    def has(self, index: int) -> Bool[Array, " slots"]:
        """One column of flags."""
        return self.rows[:, index] == 1

    @property
    def seed(self) -> UInt32[Array, "slots 2"]:
        """Both words of each seed."""
        words = self.rows[:, packing.SEED_LOW : packing.SEED_HIGH + 1]
        return lax.bitcast_convert_type(words, jnp.uint32)

    @property
    def stop_ids(self) -> Int32[Array, "slots stop_ids"]:
        """Ids that end each output, padded with NO_TOKEN."""
        return self.rows[:, packing.STOP_IDS :]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Everything a step changes.

    Attributes:
      kv: Pages of each layer.
      slots: Rows of the slots.
      tables: What the slots' rules look up.
    """

    kv: list[KVLayer]
    slots: Slots
    tables: RuleTables


def empty_slots(num_slots: int, pages_per_seq: int, max_stop_ids: int) -> Slots:
    """Slots that nobody holds."""
    return Slots(
        rows=jnp.zeros((num_slots, packing.STOP_IDS + max_stop_ids), "int32"),
        page_table=jnp.zeros((num_slots, pages_per_seq), "int32"),
    )


def apply_upload(
    slots: Slots,
    slot_rows: Int32[Array, "inserts columns"],
    page_entries: Int32[Array, "entries entry_columns"],
) -> Slots:
    """Inserts requests into slots and enters new pages; padding points past the slots."""
    entry_slot, column = page_entries[:, packing.ENTRY_SLOT], page_entries[:, packing.ENTRY_COLUMN]
    return Slots(
        rows=slots.rows.at[slot_rows[:, packing.SLOT]].set(
            slot_rows, mode="drop", unique_indices=True
        ),
        page_table=slots.page_table.at[entry_slot, column].set(
            page_entries[:, packing.ENTRY_PAGE], mode="drop", unique_indices=True
        ),
    )


def apply_rule_upload(
    tables: RuleTables,
    slot_rows: Int32[Array, "inserts columns"],
    rule_entries: Int32[Array, "entries rule_columns"],
    mask_rows: Int32[Array, "masks words"],
) -> RuleTables:
    """Forgets the history of whoever had the slots of the inserts, then enters what is new."""
    num_slots = tables.counts.shape[0]
    inserted = slot_rows[:, packing.SLOT]

    def forget(insert: Int32[Array, " one"], counts: jax.Array) -> jax.Array:
        return counts.at[inserted[insert]].set(0, mode="drop", unique_indices=True)

    counts = for_groups(
        (slot_rows[:, packing.HAS_PENALTIES] == 1) & (inserted < num_slots),
        1,
        forget,
        tables.counts,
    )
    slot, column = rule_entries[:, packing.RULE_SLOT], rule_entries[:, packing.RULE_COLUMN]
    token_id, value = rule_entries[:, packing.RULE_ID], rule_entries[:, packing.RULE_VALUE]
    is_count = column == packing.COUNTED
    beyond = num_slots + jnp.arange(slot.shape[0], dtype=jnp.int32)
    count_slot = jnp.where(is_count, slot, beyond)
    bias_slot = jnp.where(is_count, beyond, slot)

    def enter_mask(row: Int32[Array, " one"], masks: jax.Array) -> jax.Array:
        slot = mask_rows[row, packing.MASK_SLOT]
        words = mask_rows[row, packing.MASK_WORDS :]
        return masks.at[slot].set(words, mode="drop", unique_indices=True)

    return RuleTables(
        counts=counts.at[count_slot, token_id].set(
            value.astype(jnp.int16), mode="drop", unique_indices=True
        ),
        bias_ids=tables.bias_ids.at[bias_slot, column].set(
            token_id, mode="drop", unique_indices=True
        ),
        bias=tables.bias.at[bias_slot, column].set(
            lax.bitcast_convert_type(value, jnp.float32), mode="drop", unique_indices=True
        ),
        masks=for_groups(mask_rows[:, packing.MASK_SLOT] < num_slots, 1, enter_mask, tables.masks),
    )


def count_tokens(
    tables: RuleTables,
    index: Int32[Array, " rows"],
    is_counted: Bool[Array, " rows"],
    token: Int32[Array, " rows"],
) -> RuleTables:
    """Counts a sampled token in each slot whose request looks at its history."""
    num_slots = tables.counts.shape[0]
    slot = jnp.where(is_counted, index, num_slots + jnp.arange(index.shape[0], dtype=jnp.int32))
    old = tables.counts.at[slot, token].get(mode="fill", fill_value=0)
    has_room = old >> packing.COUNT_SHIFT < packing.MOST_TIMES
    new = jnp.where(has_room, old + (1 << packing.COUNT_SHIFT), old)
    counts = tables.counts.at[slot, token].set(new, mode="drop", unique_indices=True)
    return replace(tables, counts=counts)


def gather_slots(slots: Slots, index: Int32[Array, " rows"]) -> Slots:
    """Rows of the slots; an index past them reads zeros: inactive, greedy, no pages."""
    return Slots(
        rows=slots.rows.at[index].get(mode="fill", fill_value=0),
        page_table=slots.page_table.at[index].get(mode="fill", fill_value=0),
    )


def write_progress(
    slots: Slots,
    index: Int32[Array, " rows"],
    *,
    token: Int32[Array, " rows"],
    kv_len: Int32[Array, " rows"],
    active: Int32[Array, " rows"],
    remaining: Int32[Array, " rows"],
    position: Int32[Array, " rows"],
) -> Slots:
    """Writes the columns that a step changes; an index past the slots is dropped."""
    progress = jnp.stack([token, kv_len, active, remaining, position], axis=-1)
    rows = slots.rows.at[index, packing.TOKEN : packing.POSITION + 1].set(
        progress, mode="drop", unique_indices=True
    )
    return Slots(rows=rows, page_table=slots.page_table)

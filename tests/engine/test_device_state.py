"""Slots in the device's state: what a step writes there, and that padding does neither."""

import jax.numpy as jnp
import numpy as np

from octavo.engine import packing
from octavo.engine.device_state import (
    Slots,
    apply_upload,
    empty_slots,
    gather_slots,
    write_progress,
)

NUM_SLOTS = 4
COLUMNS = packing.STOP_IDS + 3


def marked_slots() -> Slots:
    """Every word of every slot is different and none is zero."""
    rows = 1000 + np.arange(NUM_SLOTS * COLUMNS, dtype=np.int32).reshape(NUM_SLOTS, COLUMNS)
    pages = 1 + np.arange(NUM_SLOTS * 5, dtype=np.int32).reshape(NUM_SLOTS, 5)
    return Slots(jnp.asarray(rows), jnp.asarray(pages))


def past_the_slots(count: int) -> np.ndarray:
    """As engine.packing pads."""
    return NUM_SLOTS + np.arange(count, dtype=np.int32)


def test_slots_that_nobody_holds_are_zero():
    slots = empty_slots(NUM_SLOTS, 5, 3)
    assert slots.rows.shape == (NUM_SLOTS, COLUMNS)
    assert slots.page_table.shape == (NUM_SLOTS, 5)
    assert not slots.rows.any()
    assert not slots.page_table.any()


def test_an_upload_of_nothing_changes_nothing():
    before = marked_slots()
    slot_rows = np.full((3, COLUMNS), 7, np.int32)
    slot_rows[:, packing.SLOT] = past_the_slots(3)
    entries = np.full((6, packing.ENTRY_COLUMNS), 2, np.int32)
    entries[:, packing.ENTRY_SLOT] = past_the_slots(6)
    after = apply_upload(before, jnp.asarray(slot_rows), jnp.asarray(entries))
    np.testing.assert_array_equal(after.rows, before.rows)
    np.testing.assert_array_equal(after.page_table, before.page_table)


def test_an_upload_enters_rows_and_pages_where_they_belong():
    before = marked_slots()
    slot_rows = np.full((2, COLUMNS), 7, np.int32)
    slot_rows[:, packing.SLOT] = 2, NUM_SLOTS
    entries = np.array([[2, 0, 50], [0, 4, 60], [NUM_SLOTS, 0, 70]], np.int32)
    after = apply_upload(before, jnp.asarray(slot_rows), jnp.asarray(entries))
    expected_rows, expected_pages = np.array(before.rows), np.array(before.page_table)
    expected_rows[2] = slot_rows[0]
    expected_pages[2, 0], expected_pages[0, 4] = 50, 60
    np.testing.assert_array_equal(after.rows, expected_rows)
    np.testing.assert_array_equal(after.page_table, expected_pages)


def test_padding_reads_zeros():
    """Inactive, greedy, no pages: not whatever the last slot holds."""
    slots = marked_slots()
    gathered = gather_slots(slots, jnp.array([3, 0, NUM_SLOTS, NUM_SLOTS + 9], jnp.int32))
    np.testing.assert_array_equal(gathered.rows[:2], slots.rows[jnp.array([3, 0])])
    np.testing.assert_array_equal(gathered.page_table[:2], slots.page_table[jnp.array([3, 0])])
    assert not gathered.rows[2:].any()
    assert not gathered.page_table[2:].any()


def test_progress_changes_its_own_columns_of_its_own_slots():
    before = marked_slots()
    index = jnp.array([2, NUM_SLOTS, 0], jnp.int32)
    names = ("token", "kv_len", "active", "remaining", "position")
    values = {
        name: jnp.array([10 * at, 10 * at + 1, 10 * at + 2], jnp.int32)
        for at, name in enumerate(names)
    }
    after = write_progress(before, index, **values)
    expected = np.array(before.rows)
    columns = [
        packing.TOKEN,
        packing.KV_LEN,
        packing.ACTIVE,
        packing.REMAINING,
        packing.POSITION,
    ]
    expected[2, columns] = [0, 10, 20, 30, 40]
    expected[0, columns] = [2, 12, 22, 32, 42]
    np.testing.assert_array_equal(after.rows, expected)
    np.testing.assert_array_equal(after.page_table, before.page_table)


def test_columns_are_read_as_what_they_are():
    rows = np.zeros((1, COLUMNS), np.int32)
    rows[0, packing.TOP_P] = packing.float_bits(0.9)
    rows[0, packing.SEED_LOW] = packing.word_bits(0xFFFF_FFFE)
    rows[0, packing.SEED_HIGH] = packing.word_bits(0x8000_0001)
    rows[0, packing.STOP_IDS :] = 5, 6, packing.NO_TOKEN
    slots = Slots(jnp.asarray(rows), jnp.zeros((1, 2), jnp.int32))
    assert slots.float_column(packing.TOP_P).tolist() == [float(np.float32(0.9))]
    assert slots.seed.tolist() == [[0xFFFF_FFFE, 0x8000_0001]]
    assert slots.stop_ids.tolist() == [[5, 6, packing.NO_TOKEN]]
    assert slots.column(packing.SEED_LOW).tolist() == [-2]

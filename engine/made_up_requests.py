"""Requests that nobody sent, put into slots by hand: to measure steps and to compare their bits.

They go through packed uploads as real ones do. Nobody else may hold a slot or a page meanwhile.
What they leave in pages is garbage: nothing past a request's length is ever read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import batched, zip_longest

import numpy as np

from . import packing
from .executor import DeviceExecutor
from .packing import UploadLayout
from .schedule import PageEntry, RuleEntry, Schedule
from .token_masks import Mask

NOTHING = Schedule(decodes=(), chunks=(), page_entries=())


@dataclass(frozen=True, kw_only=True)
class Occupant:
    """A made-up request.

    Attributes:
      slot: Where.
      kv_len: Tokens whose KV its pages pretend to hold.
      remaining: Tokens until it stops by itself. 0: it is not active, and is asked for none.
      is_active: Its next token comes from a decode row. False: from a chunk.
      columns: Other columns of its slot row, by their numbers in engine.packing.
      rule_entries: Of its slot; those of requests whose slot rows go up in one step must fit there.
      mask: Ids that may come, where its columns say that it is masked.
    """

    slot: int
    kv_len: int = 0
    remaining: int = 0
    is_active: bool = True
    columns: Mapping[int, int] = field(default_factory=dict)
    rule_entries: Sequence[RuleEntry] = ()
    mask: Mask | None = None


def blank(layout: UploadLayout) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """An upload of nothing but padding, and views of its parts."""
    packed = packing.pack(NOTHING, layout)
    return packed, layout.split(packed)


def enter(
    executor: DeviceExecutor,
    layout: UploadLayout,
    occupants: Iterable[Occupant],
    pages: Mapping[int, Sequence[int]],
) -> None:
    """Puts requests into slots and gives slots pages, in as many steps as it takes.

    Args:
      executor: Runs the steps.
      layout: Of a mixed step; slot rows travel in no other.
      occupants: Whose slot rows are written.
      pages: Of slots, in order.
    """
    entries = [
        PageEntry(slot, column, page)
        for slot, its_pages in pages.items()
        for column, page in enumerate(its_pages)
    ]
    for rows, group in zip_longest(
        batched(occupants, layout.parts["slot_rows"][0]),
        batched(entries, layout.parts["page_entries"][0]),
        fillvalue=(),
    ):
        packed, parts = blank(layout)
        for row, occupant in zip(parts["slot_rows"], rows, strict=False):
            row[:] = 0
            row[packing.STOP_IDS :] = packing.NO_TOKEN
            row[packing.SLOT] = occupant.slot
            row[packing.KV_LEN] = occupant.kv_len
            row[packing.ACTIVE] = occupant.is_active and occupant.remaining > 0
            row[packing.REMAINING] = occupant.remaining
            for column, value in occupant.columns.items():
                row[column] = value
        # With its row: a slot row forgets the history of whoever had the slot.
        rules = [entry for occupant in rows for entry in occupant.rule_entries]
        assert len(rules) <= len(parts["rule_entries"]), "too many rule entries"
        parts["rule_entries"][: len(rules)] = np.reshape(rules, (-1, packing.RULE_COLUMNS))
        masked = [(occupant.slot, *occupant.mask) for occupant in rows if occupant.mask is not None]
        masks = packing.no_masks(layout) if masked else None
        if masks is not None:
            masks[: len(masked)] = masked
        for row, entry in zip(parts["page_entries"], group, strict=False):
            row[packing.ENTRY_SLOT] = entry.slot
            row[packing.ENTRY_COLUMN] = entry.column
            row[packing.ENTRY_PAGE] = entry.page
        executor.fetch(executor.dispatch(layout.key, packed, masks))


def vacate(executor: DeviceExecutor, layout: UploadLayout) -> None:
    """Leaves every slot inactive."""
    enter(executor, layout, [Occupant(slot=slot) for slot in range(layout.num_slots)], {})

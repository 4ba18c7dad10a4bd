"""Compares bits at the start of a deterministic engine, and refuses where they differ.

One executable is no proof: a kernel may split its sums by how many rows are live, or a library by
how many threads are free. So one made-up request runs on the real device in several surroundings:
alone and among others, in other slots, rows and pages, its second chunk in other places of the
step's chunk, its decode rows beside a chunk and without; the last of them with every rule on its
logits. What is sampled, all log-probabilities and those of the prompt must be the same bits. That
finds what depends on where or beside whom a request runs; it is no search for the one batch in a
million.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from . import packing
from .executor import DeviceExecutor
from .made_up_requests import Occupant, blank, enter, vacate
from .packing import StepResult, UploadLayout
from .sampling_params import SamplingParams
from .schedule import RuleEntry
from .token_masks import ids_mask

DECODES = 4  # decode rows of the request in each surrounding, the last half of them with rules
MOST_STEPS = 2 + DECODES  # of one surrounding
FILLER_PAGES = 64  # at most, of one other request
SEED = 12345

# What the request asks for: every report there is, and a draw from most of the distribution.
ASKED = {
    packing.TEMPERATURE: packing.float_bits(1.0),
    packing.TOP_P: packing.float_bits(0.95),
    packing.SEED_LOW: SEED,
    packing.LOGPROBS: 1,
    packing.TOP_LOGPROBS: 1,
    packing.PROMPT_TOP_LOGPROBS: 1,
}

PENALTIES = {
    packing.HAS_PENALTIES: 1,
    packing.REPETITION_PENALTY: packing.float_bits(1.3),
    packing.FREQUENCY_PENALTY: packing.float_bits(0.5),
    packing.PRESENCE_PENALTY: packing.float_bits(-0.5),
}
BIASES = (0.5, -1.0, 2.0)
MOST_COUNTS = 32  # ids of the prompt whose counts are entered, at most


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where and beside whom the request runs.

    Attributes:
      name: For the message.
      slot, row: Of the request; counted from the end if negative.
      others: Part of the other slots that decode at the same time.
      before, after: Whether tokens of another prompt share its second chunk.
      chunk_beside: Whether another prompt's chunk runs beside its decode rows.
    """

    name: str
    slot: int = 0
    row: int = 0
    others: float = 0.0
    before: bool = False
    after: bool = False
    chunk_beside: bool = False


ALONE = Surroundings(name="alone")
OTHERS = (
    Surroundings(name="alone in the last slot and row", slot=-1, row=-1),
    Surroundings(name="with all other rows full", others=1.0),
    Surroundings(name="with half of the other rows full", slot=1, row=1, others=0.5),
    Surroundings(name="behind another prompt in the chunk", before=True),
    Surroundings(name="before another prompt in the chunk", after=True),
    Surroundings(name="beside another prompt's chunk", chunk_beside=True),
    Surroundings(
        name="in a full batch", slot=-1, row=-1, others=1.0, before=True, chunk_beside=True
    ),
)


def check_determinism(
    executor: DeviceExecutor,
    layout: UploadLayout,
    *,
    num_pages: int,
    pages_per_seq: int,
    vocab_size: int,
) -> None:
    """Runs a request in several surroundings; afterwards no slot is active.

    Args:
      executor: No slot is active.
      layout: Of the one executable.
      num_pages: Pages of the pool, page 0 included.
      pages_per_seq: Columns of the page table.
      vocab_size: Of the model.

    Raises:
      ValueError: Something depends on the surroundings; the message says what and on which.
    """
    probe = _Probe(executor, layout, num_pages - 1, pages_per_seq, vocab_size)
    expected = probe.run(ALONE)
    for surroundings in OTHERS:
        found = probe.run(surroundings)
        for what, bits in expected.items():
            num_different = int((found[what] != bits).sum())
            if num_different:
                raise ValueError(
                    f"deterministic is True; it must be False on this device, where {what} of a "
                    f"request that runs {surroundings.name} are other bits than alone: "
                    f"{num_different} of {bits.size} words differ"
                )
    vacate(executor, layout)


class _Probe:
    """The made-up request, and others around it."""

    def __init__(
        self,
        executor: DeviceExecutor,
        layout: UploadLayout,
        num_usable: int,
        pages_per_seq: int,
        vocab_size: int,
    ) -> None:
        self._executor = executor
        self._layout = layout
        size, chunk = layout.page_size, layout.key.chunk
        wanted = chunk + max(chunk // 2, 1)  # a chunk and a half, if there are pages for it
        columns = min(-(-(wanted + DECODES) // size), pages_per_seq, num_usable)
        self._length = min(wanted, max(columns * size - DECODES, 1))
        self._columns = columns
        self._num_decodes = min(DECODES, columns * size - self._length)
        self._num_usable = num_usable
        self._pages_per_seq = pages_per_seq
        rng = np.random.default_rng(SEED)
        self._tokens = rng.integers(0, vocab_size, self._length + 1).astype(np.int32)
        self._ids = rng.permutation(vocab_size).tolist()  # to be biased, banned and waited for
        self._other_tokens = rng.integers(0, vocab_size, 4 * chunk).astype(np.int32)
        self._filler_tokens = rng.integers(0, vocab_size, layout.num_slots).tolist()

    def run(self, where: Surroundings) -> dict[str, np.ndarray]:
        """What the request brings there, in words as they were downloaded."""
        layout, chunk = self._layout, self._layout.key.chunk
        vacate(self._executor, layout)
        slots = list(range(layout.num_slots))
        slot = slots.pop(where.slot % layout.num_slots)
        pages = list(range(1, self._num_usable + 1))
        if where.slot < 0:  # other pages, in another order
            pages.reverse()
        own, pages = pages[: self._columns], pages[self._columns :]
        has_neighbour = where.before or where.after or where.chunk_beside
        neighbour = self._neighbour(slots, pages) if has_neighbour else None
        fillers = list(self._fillers(slots[: round(where.others * len(slots))], pages))
        table = {slot: own} | {each.slot: its_pages for each, its_pages in fillers}
        if neighbour is not None:
            table[neighbour[0]] = neighbour[1]
        request = Occupant(
            slot=slot, remaining=self._num_decodes + 1, is_active=False, columns=ASKED
        )
        enter(self._executor, layout, [request, *(each for each, _ in fillers)], table)

        rows = self._rows(slot, where.row, [each.slot for each, _ in fillers])
        others = [None if each == slot else each for each in rows]
        most = 0 if neighbour is None else min(chunk, len(neighbour[1]) * layout.page_size)
        tokens: list[np.ndarray] = []
        scores: list[np.ndarray] = []
        for start in range(0, self._length, chunk):
            own_segment = (slot, start, min(chunk, self._length - start))
            segments = [own_segment]
            if neighbour is not None and own_segment[2] < chunk:
                filler = (neighbour[0], 0, min(most, chunk - own_segment[2]))
                segments = [filler] * where.before + segments + [filler] * where.after
            result = self._step(others, segments, slot)
            index = segments.index(own_segment)
            offset = sum(length for _, _, length in segments[:index])
            scores.append(result.scores[offset : offset + own_segment[2]])
            if start + chunk >= self._length:
                tokens.append(result.samples[layout.key.rows + index])
        beside = [(neighbour[0], 0, most)] if neighbour is not None and where.chunk_beside else []
        for number in range(self._num_decodes):
            if number == self._num_decodes // 2:
                last = int(tokens[-1][packing.SAMPLE_TOKEN])
                enter(self._executor, layout, [self._with_rules(slot, number, last)], {})
            tokens.append(self._step(rows, beside, slot).samples[rows.index(slot)])
        sampled = np.stack(tokens)
        if not (sampled[:, packing.SAMPLE_STATUS] & packing.VALID).all():
            raise ValueError("deterministic is True; the check at start sampled no valid token")
        return {
            "sampled tokens": sampled[:, packing.SAMPLE_TOKEN],
            "log-probabilities": sampled[:, packing.SAMPLE_LOGPROB :],
            "log-probabilities of prompt tokens": np.concatenate(scores),
        }

    def _with_rules(self, slot: int, num_decoded: int, token: int) -> Occupant:
        """The request after so many decode rows; from now on every rule changes its logits."""
        stop_id, *biased = self._ids[: 1 + len(BIASES)]
        banned = self._ids[len(self._ids) // 2 :]
        counted = np.unique(self._tokens[: self._length])[:MOST_COUNTS].tolist()
        entries = [
            RuleEntry(slot, column, token_id, packing.float_bits(bias))
            for column, (token_id, bias) in enumerate(zip(biased, BIASES, strict=True))
        ]
        return Occupant(
            slot=slot,
            kv_len=self._length + num_decoded,
            remaining=self._num_decodes - num_decoded,
            columns={
                **ASKED,
                **PENALTIES,
                packing.TOKEN: token,
                packing.POSITION: num_decoded + 1,
                packing.NUM_BIASED: len(entries),
                packing.IS_MASKED: 1,
                packing.MIN_TOKENS: MOST_STEPS + 1,
                packing.STOP_IDS: stop_id,
            },
            rule_entries=entries + [RuleEntry(slot, packing.COUNTED, each, 1) for each in counted],
            mask=ids_mask(SamplingParams(banned_token_ids=tuple(banned)), len(self._ids)),
        )

    def _neighbour(self, slots: list[int], pages: list[int]) -> tuple[int, list[int]] | None:
        """Slot and pages, taken from those, for another prompt; None: there are none left."""
        count = min(-(-self._layout.key.chunk // self._layout.page_size), self._pages_per_seq)
        if not slots or not pages:
            return None
        its_pages = pages[:count]
        del pages[:count]
        return slots.pop(), its_pages

    def _fillers(self, slots: list[int], pages: list[int]) -> Iterator[tuple[Occupant, list[int]]]:
        """Others that decode, with contexts of different lengths.

        Every other one samples, and every third has penalties.
        """
        size = self._layout.page_size
        most = min(len(pages) // max(len(slots), 1), FILLER_PAGES, self._pages_per_seq)
        for number, slot in enumerate(slots if most else ()):
            its_pages = pages[number * most : (number + 1) * most]
            room = most * size - MOST_STEPS
            kv_len = max(room, 0) * (number % 4) // 3
            yield (
                Occupant(
                    slot=slot,
                    kv_len=kv_len,
                    remaining=min(MOST_STEPS, most * size - kv_len),
                    columns={
                        packing.TOKEN: self._filler_tokens[slot],
                        packing.TEMPERATURE: packing.float_bits(float(number % 2)),
                        packing.TOP_P: packing.float_bits(0.5),
                        packing.SEED_LOW: slot,
                        **(PENALTIES if number % 3 == 0 else {}),
                    },
                ),
                its_pages,
            )

    def _rows(self, slot: int, row: int, others: list[int]) -> list[int | None]:
        """Which slot decodes in which row; None: nobody."""
        num_rows = min(self._layout.key.rows, self._layout.num_slots)
        rows: list[int | None] = [*others, *[None] * num_rows][: num_rows - 1]
        rows.insert(row % num_rows, slot)
        return rows

    def _step(
        self, rows: list[int | None], segments: list[tuple[int, int, int]], slot: int
    ) -> StepResult:
        """Runs a step of these rows and (slot, start, length) segments, and reads it."""
        layout = self._layout
        packed, parts = blank(layout)
        for at, its_slot in enumerate(rows):
            if its_slot is not None:
                parts["decode_slots"][at] = its_slot
        offset = 0
        for segment, (its_slot, start, length) in zip(parts["segments"], segments, strict=False):
            is_last = its_slot == slot and start + length == self._length
            segment[:] = its_slot, start, length, is_last
            tokens = self._tokens if its_slot == slot else self._other_tokens
            parts["chunk_tokens"][offset : offset + length] = tokens[start : start + length]
            if its_slot == slot:
                targets = tokens[start + 1 : start + length + 1]
                parts["chunk_targets"][offset : offset + length] = targets
            offset += length
        executor = self._executor
        return packing.unpack(layout.key, executor.fetch(executor.dispatch(layout.key, packed)))

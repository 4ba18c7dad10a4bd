"""The one array a step uploads and the one it downloads: layout, packing, unpacking. NumPy only.

Both are flat int32 arrays of a length fixed by the StepKey; floats travel as their bits. The
device side slices the same layout (`UploadLayout.split` works on NumPy and JAX arrays alike), so
the layout is written down once, here.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..configs.engine_config import EngineConfig
from .sampling_checks import MAX_TOP_LOGPROBS
from .schedule import Schedule
from .step_shapes import HIT_PAGE_ENTRIES, RULE_ENTRIES, StepKey, StepShapes
from .token_masks import num_words

# Columns of a slot row: the same in an upload and in device state. max_stop_ids columns of stop ids
# follow, padded with NO_TOKEN. A step changes those from TOKEN to POSITION and no others.
SLOT = 0
TOKEN = 1  # the last sampled token, which the next decode row feeds
KV_LEN = 2  # tokens whose KV is in the pages
ACTIVE = 3  # 1 while the slot decodes: from its first sampled token until it stops
REMAINING = 4  # output tokens still to sample, the next one included
POSITION = 5  # output position of the next token
TEMPERATURE = 6  # float32 bits
TOP_K = 7
TOP_P = 8  # float32 bits
MIN_P = 9  # float32 bits
SEED_LOW = 10  # uint32 bits
SEED_HIGH = 11  # uint32 bits
LOGPROBS = 12  # 1: report the log-probability of each sampled token
TOP_LOGPROBS = 13  # 1: and of the most likely ones
PROMPT_TOP_LOGPROBS = 14  # 1: the same for the prompt's tokens
CHOICE = 15
MIN_TOKENS = 16  # output tokens before a stop id may come
HAS_PENALTIES = 17  # 1: the next three count, and what the tables know of its ids
REPETITION_PENALTY = 18  # float32 bits
FREQUENCY_PENALTY = 19  # float32 bits
PRESENCE_PENALTY = 20  # float32 bits
NUM_BIASED = 21  # columns of the bias table
IS_MASKED = 22  # 1: only ids of its mask may come
STOP_IDS = 23

# Columns of a segment: whose tokens a run of the chunk holds.
SEGMENT_SLOT = 0
SEGMENT_START = 1  # tokens of the request before this chunk
SEGMENT_LENGTH = 2
SEGMENT_IS_LAST = 3  # 1: its last token samples
SEGMENT_COLUMNS = 4

# Columns of a page entry.
ENTRY_SLOT = 0
ENTRY_COLUMN = 1
ENTRY_PAGE = 2
ENTRY_COLUMNS = 3

# Columns of a rule entry: see engine.rule_entries.
RULE_SLOT = 0
RULE_COLUMN = 1  # of the bias table; COUNTED: the entry is of the counts
RULE_ID = 2
RULE_VALUE = 3  # a count; or the bits of a bias, float32
RULE_COLUMNS = 4
COUNTED = -1

# A count: bit 0 says that the id is in the prompt, the rest how often it is in the output.
COUNT_SHIFT = 1
MOST_TIMES = 2**14 - 1  # and no more: it is 16 bits wide

# A mask row: the slot, then the words of the mask.
MASK_SLOT = 0
MASK_WORDS = 1

# Columns of a sample, and the bits of its status. The most likely ids follow, and the bits of
# their log-probabilities.
SAMPLE_TOKEN = 0
SAMPLE_STATUS = 1
SAMPLE_LOGPROB = 2  # float32 bits
SAMPLE_TOP = 3
SAMPLE_COLUMNS = SAMPLE_TOP + 2 * MAX_TOP_LOGPROBS
VALID = 1  # the row was live: the token counts
STOPPED = 2  # the token is one of the request's stop ids
EXHAUSTED = 4  # it was the last of max_tokens
BROKEN = 8  # alone: the token means nothing (see engine.sampler.Samples), or a score of the chunk

# Columns of a scored chunk token: its target's log-probability, then likewise.
SCORE_LOGPROB = 0  # float32 bits
SCORE_TOP = 1
SCORE_COLUMNS = SCORE_TOP + 2 * MAX_TOP_LOGPROBS

NO_TOKEN = -1


@dataclass(frozen=True)
class UploadLayout:
    """Where each part of a step's upload lies.

    Attributes:
      key: The executable.
      num_slots: Slots of the engine. Padding points past them: an entry that is not used holds
        slot num_slots + i, out of range, unique and dropped by the scatter.
      page_size: Tokens per page.
      max_stop_ids: Stop-id columns of a slot row.
      mask_words: Words of a mask.
    """

    key: StepKey
    num_slots: int
    page_size: int
    max_stop_ids: int
    mask_words: int

    @cached_property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part, in order."""
        key = self.key
        return {
            "slot_rows": (key.segments, STOP_IDS + self.max_stop_ids),
            # A decode row starts at most one page; a segment of n tokens at most n / page_size + 1.
            "page_entries": (
                key.rows + key.chunk // self.page_size + key.segments + HIT_PAGE_ENTRIES,
                ENTRY_COLUMNS,
            ),
            "rule_entries": (RULE_ENTRIES, RULE_COLUMNS),
            "decode_slots": (key.rows,),
            "segments": (key.segments, SEGMENT_COLUMNS),
            "chunk_tokens": (key.chunk,),
            "chunk_targets": (key.chunk,),
        }

    @cached_property
    def size(self) -> int:
        """Length of the upload in int32 words."""
        return sum(map(math.prod, self.parts.values()))

    @property
    def masks_shape(self) -> tuple[int, int]:
        """Of the mask rows that go up beside it: at most one for each token that it samples."""
        return self.key.samples, MASK_WORDS + self.mask_words

    def split(self, packed: Any) -> dict[str, Any]:
        """Views of a packed NumPy array, or slices of a traced one, by part name."""
        views: dict[str, Any] = {}
        start = 0
        for name, shape in self.parts.items():
            stop = start + math.prod(shape)
            views[name] = packed[start:stop].reshape(shape)
            start = stop
        return views


def upload_layouts(config: EngineConfig, vocab_size: int) -> list[UploadLayout]:
    """The layout of each executable, the costliest first: what is compiled, and what is packed."""
    return [
        UploadLayout(
            key, config.max_num_seqs, config.page_size, config.max_stop_ids, num_words(vocab_size)
        )
        for key in StepShapes.from_config(config).all_keys()
    ]


def float_bits(value: float) -> int:
    """The bits of a float32, as the int32 that carries them."""
    return int(np.float32(value).view(np.int32))


def word_bits(value: int) -> int:
    """The bits of a uint32, as the int32 that carries them."""
    return int(np.uint32(value).view(np.int32))


def pack(schedule: Schedule, layout: UploadLayout) -> np.ndarray:
    """The upload of one step. A fresh array each time: the device may still read the last."""
    packed = np.zeros(layout.size, np.int32)
    part = layout.split(packed)
    # Until a prompt's last chunk there is no token, no KV and no decode row; but whoever comes back
    # with all its KV goes on from what it sampled.
    inserts = [(chunk.state, False) for chunk in schedule.chunks if chunk.is_insert]
    inserts += [(state, state.is_past_prompt) for state in schedule.inserts]
    # What did not fit would be lost without a word, and a row would read page 0.
    assert len(schedule.page_entries) <= len(part["page_entries"]), "too many page entries"
    assert len(inserts) <= len(part["slot_rows"]), "too many inserts"
    assert len(schedule.chunks) <= len(part["segments"]), "too many chunks"
    assert len(schedule.rule_entries) <= len(part["rule_entries"]), "too many rule entries"
    beyond = layout.num_slots + np.arange(layout.size, dtype=np.int32)
    part["slot_rows"][:, SLOT] = beyond[: len(part["slot_rows"])]
    part["page_entries"][:, ENTRY_SLOT] = beyond[: len(part["page_entries"])]
    part["rule_entries"][:, RULE_SLOT] = beyond[: len(part["rule_entries"])]
    part["decode_slots"][:] = beyond[: layout.key.rows]
    part["segments"][:, SEGMENT_SLOT] = beyond[layout.key.rows :][: layout.key.segments]
    part["chunk_targets"][:] = NO_TOKEN

    part["decode_slots"][: len(schedule.decodes)] = [state.slot for state in schedule.decodes]
    for row, entry in zip(part["page_entries"], schedule.page_entries, strict=False):
        row[:] = entry.slot, entry.column, entry.page
    for row, entry in zip(part["rule_entries"], schedule.rule_entries, strict=False):
        row[:] = entry
    for row, (state, goes_on) in zip(part["slot_rows"], inserts, strict=False):
        sampling, outputs = state.request.sampling, state.output_token_ids
        row[:STOP_IDS] = (
            state.slot,
            outputs[-1] if goes_on else 0,
            len(state.request.prompt_token_ids) + len(outputs) - 1 if goes_on else 0,
            goes_on,
            state.max_tokens - len(outputs),
            len(outputs),
            float_bits(sampling.temperature),
            sampling.top_k,
            float_bits(sampling.top_p),
            float_bits(sampling.min_p),
            word_bits(state.seed & 0xFFFFFFFF),
            word_bits(state.seed >> 32),
            sampling.logprobs,
            sampling.top_logprobs > 0,
            sampling.prompt_top_logprobs > 0,
            state.choice,
            # Of a guide the host rules out what must not come yet.
            0 if sampling.guide is not None else sampling.min_tokens,
            sampling.has_penalties,
            float_bits(sampling.repetition_penalty),
            float_bits(sampling.frequency_penalty),
            float_bits(sampling.presence_penalty),
            len(sampling.logit_bias),
            state.is_masked,
        )
        row[STOP_IDS:] = NO_TOKEN
        row[STOP_IDS : STOP_IDS + len(state.stop_ids)] = state.stop_ids
    at = 0
    for row, chunk in zip(part["segments"], schedule.chunks, strict=False):
        row[:] = chunk.state.slot, chunk.start, chunk.length, chunk.is_last
        end = chunk.start + chunk.length
        part["chunk_tokens"][at : at + chunk.length] = chunk.state.tokens_between(chunk.start, end)
        prompt = chunk.state.request.prompt_token_ids
        if chunk.state.request.sampling.prompt_logprobs:
            targets = prompt[chunk.start + 1 : end + 1]
            part["chunk_targets"][at : at + len(targets)] = targets
        at += chunk.length
    return packed


def no_masks(layout: UploadLayout) -> np.ndarray:
    """Mask rows that change nothing."""
    rows = np.zeros(layout.masks_shape, np.int32)
    rows[:, MASK_SLOT] = layout.num_slots + np.arange(len(rows))
    return rows


def pack_masks(schedule: Schedule, layout: UploadLayout) -> np.ndarray | None:
    """The mask rows of one step; None: none changes, as in most steps.

    A guided request's changes with every token, that of any other comes with its first one.
    """
    if not schedule.masked:
        return None
    rows = no_masks(layout)
    assert len(schedule.masked) <= len(rows), "too many masks"
    for row, state in zip(rows, schedule.masked, strict=False):
        row[MASK_SLOT] = state.slot
        row[MASK_WORDS:] = state.mask
    return rows


@dataclass(frozen=True)
class StepResult:
    """What a step brought. A sample for each decode row, in row order, then one for each segment.

    Attributes:
      token_ids: Sampled tokens.
      statuses: Bits: VALID, STOPPED, EXHAUSTED, BROKEN. Of the segments only the last chunk of a
        prompt is VALID; any may be BROKEN.
      samples: int32 [samples, SAMPLE_COLUMNS]: all of it, where more was asked for.
      scores: int32 [chunk, SCORE_COLUMNS]: of each chunk token's target; 0 where none was asked
        for.
    """

    token_ids: list[int]
    statuses: list[int]
    samples: np.ndarray
    scores: np.ndarray

    def logprob(self, row: int) -> float:
        """The log-probability of a sampled token."""
        return float(self.samples[row, SAMPLE_LOGPROB].view(np.float32))

    def top(self, row: int, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The `count` most likely ids where a token was sampled, and their log-probabilities."""
        return _top(self.samples[row : row + 1, SAMPLE_TOP:], count)

    def chunk_logprobs(self, start: int, end: int) -> tuple[float, ...]:
        """The log-probabilities of the targets of chunk tokens [start, end)."""
        return tuple(self.scores[start:end, SCORE_LOGPROB].view(np.float32).tolist())

    def chunk_top(
        self, start: int, end: int, count: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The `count` most likely ids for each of them, one after the other, and theirs."""
        return _top(self.scores[start:end, SCORE_TOP:], count)


def _top(columns: np.ndarray, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    ids = columns[:, :count]
    logprobs = columns[:, MAX_TOP_LOGPROBS : MAX_TOP_LOGPROBS + count]
    return tuple(ids.ravel().tolist()), tuple(logprobs.ravel().view(np.float32).tolist())


def unpack(key: StepKey, result: np.ndarray) -> StepResult:
    """The download of one step, read."""
    columns = result[: key.samples * SAMPLE_COLUMNS].reshape(key.samples, SAMPLE_COLUMNS)
    return StepResult(
        token_ids=columns[:, SAMPLE_TOKEN].tolist(),
        statuses=columns[:, SAMPLE_STATUS].tolist(),
        samples=columns,
        scores=result[columns.size :].reshape(key.chunk, SCORE_COLUMNS),
    )

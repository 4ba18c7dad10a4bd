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
from .schedule import Schedule
from .step_shapes import HIT_PAGE_ENTRIES, StepKey, StepShapes

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
STOP_IDS = 13

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

# Columns of a sample, and the bits of its status.
SAMPLE_TOKEN = 0
SAMPLE_STATUS = 1
SAMPLE_LOGPROB = 2  # float32 bits
SAMPLE_COLUMNS = 3
VALID = 1  # the row was live: the token counts
STOPPED = 2  # the token is one of the request's stop ids
EXHAUSTED = 4  # it was the last of max_tokens

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
    """

    key: StepKey
    num_slots: int
    page_size: int
    max_stop_ids: int

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
            "decode_slots": (key.rows,),
            "segments": (key.segments, SEGMENT_COLUMNS),
            "chunk_tokens": (key.chunk,),
            "chunk_targets": (key.chunk,),
        }

    @cached_property
    def size(self) -> int:
        """Length of the upload in int32 words."""
        return sum(map(math.prod, self.parts.values()))

    def split(self, packed: Any) -> dict[str, Any]:
        """Views of a packed NumPy array, or slices of a traced one, by part name."""
        views: dict[str, Any] = {}
        start = 0
        for name, shape in self.parts.items():
            stop = start + math.prod(shape)
            views[name] = packed[start:stop].reshape(shape)
            start = stop
        return views


def upload_layouts(config: EngineConfig) -> list[UploadLayout]:
    """The layout of each executable, the costliest first: what is compiled, and what is packed."""
    return [
        UploadLayout(key, config.max_num_seqs, config.page_size, config.max_stop_ids)
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
    inserts = [chunk.state for chunk in schedule.chunks if chunk.is_insert]
    # What did not fit would be lost without a word, and a row would read page 0.
    assert len(schedule.page_entries) <= len(part["page_entries"]), "too many page entries"
    assert len(inserts) <= len(part["slot_rows"]), "too many inserts"
    assert len(schedule.chunks) <= len(part["segments"]), "too many chunks"
    beyond = layout.num_slots + np.arange(layout.size, dtype=np.int32)
    part["slot_rows"][:, SLOT] = beyond[: len(part["slot_rows"])]
    part["page_entries"][:, ENTRY_SLOT] = beyond[: len(part["page_entries"])]
    part["decode_slots"][:] = beyond[: layout.key.rows]
    part["segments"][:, SEGMENT_SLOT] = beyond[layout.key.rows :][: layout.key.segments]
    part["chunk_targets"][:] = NO_TOKEN

    part["decode_slots"][: len(schedule.decodes)] = [state.slot for state in schedule.decodes]
    for row, entry in zip(part["page_entries"], schedule.page_entries, strict=False):
        row[:] = entry.slot, entry.column, entry.page
    for row, state in zip(part["slot_rows"], inserts, strict=False):
        sampling = state.request.sampling
        row[:STOP_IDS] = (
            state.slot,
            0,  # no token yet,
            0,  # no KV,
            0,  # not active: all three come with the prompt's last chunk
            state.max_tokens - len(state.output_token_ids),
            len(state.output_token_ids),
            float_bits(sampling.temperature),
            sampling.top_k,
            float_bits(sampling.top_p),
            float_bits(sampling.min_p),
            word_bits(state.seed & 0xFFFFFFFF),
            word_bits(state.seed >> 32),
            sampling.logprobs,
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


@dataclass(frozen=True)
class StepResult:
    """What a step brought. A sample for each decode row, in row order, then one for each segment.

    Attributes:
      token_ids: Sampled tokens.
      statuses: Bits: VALID, STOPPED, EXHAUSTED. Of the segments only the last chunk of a prompt is
        VALID.
      logprobs: float32 [samples]: of the sampled tokens, where asked for.
      chunk_logprobs: float32 [chunk]: of each chunk token's target; 0 where none was asked for.
    """

    token_ids: list[int]
    statuses: list[int]
    logprobs: np.ndarray
    chunk_logprobs: np.ndarray


def unpack(key: StepKey, result: np.ndarray) -> StepResult:
    """The download of one step, read."""
    columns = result[: key.samples * SAMPLE_COLUMNS].reshape(key.samples, SAMPLE_COLUMNS)
    return StepResult(
        token_ids=columns[:, SAMPLE_TOKEN].tolist(),
        statuses=columns[:, SAMPLE_STATUS].tolist(),
        logprobs=columns[:, SAMPLE_LOGPROB].copy().view(np.float32),
        chunk_logprobs=result[key.samples * SAMPLE_COLUMNS :].copy().view(np.float32),
    )

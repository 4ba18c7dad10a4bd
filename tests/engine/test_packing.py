"""What goes into an upload comes out of it, and what is unused points nowhere."""

from typing import Any

import numpy as np
import pytest

from octavo.engine import packing
from octavo.engine.packing import UploadLayout, no_masks, pack, unpack
from octavo.engine.sampling_checks import MAX_TOP_LOGPROBS
from octavo.engine.schedule import PageEntry, PrefillChunk, RequestState, Schedule
from octavo.engine.step_shapes import StepKey

from .fakes import request

NOTHING = Schedule(decodes=(), chunks=(), page_entries=())


def layout(rows: int = 4, chunk: int = 16, page_size: int = 4) -> UploadLayout:
    return UploadLayout(
        StepKey(rows, chunk), num_slots=10, page_size=page_size, max_stop_ids=3, mask_words=2
    )


def state(
    slot: int,
    prompt: tuple[int, ...] = (1, 2, 3, 4, 5),
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> RequestState:
    values = {"max_tokens": 9, "stop_ids": (7, 8), "seed": 2**64 - 2} | fields
    return RequestState(request=request(f"r{slot}", prompt, **sampling or {}), slot=slot, **values)


def chunk(of: RequestState, start: int, length: int, **flags: bool) -> PrefillChunk:
    values = {"is_insert": False, "is_last": False} | flags
    return PrefillChunk(state=of, start=start, length=length, generation=1, **values)


def parts(schedule: Schedule, of: UploadLayout) -> dict[str, np.ndarray]:
    packed = pack(schedule, of)
    assert packed.shape == (of.size,)
    assert packed.dtype == np.int32
    return of.split(packed)


def test_parts_fill_the_upload_without_gap_or_overlap():
    of = layout()
    split = of.split(np.arange(of.size))
    assert list(split) == list(of.parts)
    np.testing.assert_array_equal(
        np.concatenate([part.reshape(-1) for part in split.values()]), np.arange(of.size)
    )
    assert {name: part.shape for name, part in split.items()} == of.parts


@pytest.mark.parametrize("chunk_tokens", [0, 1, 16])
def test_padding_is_out_of_range_and_unique(chunk_tokens: int):
    """Failure case 9.1: -1 would wrap to the last slot; twice the same index would be a race."""
    of = layout(chunk=chunk_tokens)
    part = parts(NOTHING, of)
    indices = {
        "slot_rows": part["slot_rows"][:, packing.SLOT],
        "page_entries": part["page_entries"][:, packing.ENTRY_SLOT],
        "rule_entries": part["rule_entries"][:, packing.RULE_SLOT],
        "masks": no_masks(of)[:, packing.MASK_SLOT],
        # The step scatters to these two at once.
        "rows": np.concatenate([part["decode_slots"], part["segments"][:, packing.SEGMENT_SLOT]]),
    }
    for name, slots in indices.items():
        assert (slots >= of.num_slots).all(), name
        assert len(set(slots.tolist())) == len(slots), name
    assert not part["segments"][:, packing.SEGMENT_LENGTH].any()
    assert not part["chunk_tokens"].any(), "padding must be a valid token id"
    assert (part["chunk_targets"] == packing.NO_TOKEN).all()


def test_padding_stays_unique_beside_real_rows():
    of = layout()
    first = state(0)
    part = parts(
        Schedule(
            decodes=(state(9), state(3)),
            chunks=(chunk(first, 0, 2, is_insert=True),),
            page_entries=(PageEntry(slot=0, column=0, page=5),),
        ),
        of,
    )
    rows = np.concatenate([part["decode_slots"], part["segments"][:, packing.SEGMENT_SLOT]])
    assert len(set(rows.tolist())) == len(rows)
    assert sorted(rows[rows < of.num_slots].tolist()) == [0, 3, 9]


def test_a_slot_row_holds_everything_about_a_request():
    sampling = {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "logprobs": True,
    }
    seed = 0xFEDC_BA98_7654_3210
    one = state(6, sampling=sampling, seed=seed, output_token_ids=[4, 4])
    row = parts(
        Schedule(decodes=(), chunks=(chunk(one, 0, 5, is_insert=True),), page_entries=()), layout()
    )["slot_rows"][0]
    assert row[packing.SLOT] == 6
    assert row[packing.TOKEN : packing.REMAINING].tolist() == [0, 0, 0]
    # Two of nine were sampled before it was preempted.
    assert row[packing.REMAINING] == 7
    assert row[packing.POSITION] == 2
    for column, value in (
        (packing.TEMPERATURE, 0.7),
        (packing.TOP_P, 0.95),
        (packing.MIN_P, 0.05),
    ):
        assert row[column : column + 1].view(np.float32)[0] == np.float32(value)
    assert row[packing.TOP_K] == 40
    words = row[packing.SEED_LOW : packing.SEED_HIGH + 1].copy().view(np.uint32).tolist()
    assert words[0] | words[1] << 32 == seed
    assert row[packing.LOGPROBS] == 1
    assert row[packing.STOP_IDS :].tolist() == [7, 8, packing.NO_TOKEN]


def test_chunks_are_packed_one_after_the_other():
    """With targets (the next prompt token) only where prompt log-probabilities were asked for."""
    scored = state(1, (10, 11, 12, 13), sampling={"prompt_logprobs": True})
    resumed = state(2, (20, 21, 22), output_token_ids=[23, 24], sampling={"prompt_logprobs": True})
    plain = state(3, (30, 31))
    part = parts(
        Schedule(
            decodes=(state(5), state(4)),
            chunks=(
                chunk(scored, 1, 2),
                chunk(resumed, 1, 4, is_last=True),
                chunk(plain, 0, 2, is_insert=True, is_last=True),
            ),
            page_entries=(
                PageEntry(slot=1, column=3, page=17),
                PageEntry(slot=4, column=0, page=2),
            ),
        ),
        layout(),
    )
    none = packing.NO_TOKEN
    assert part["decode_slots"][:2].tolist() == [5, 4]
    assert part["segments"][:3].tolist() == [[1, 1, 2, 0], [2, 1, 4, 1], [3, 0, 2, 1]]
    assert part["chunk_tokens"][:9].tolist() == [11, 12, 21, 22, 23, 24, 30, 31, 0]
    # The last prompt token has no next one; outputs are not scored.
    assert part["chunk_targets"][:9].tolist() == [12, 13, 22, none, none, none, none, none, none]
    assert part["page_entries"][:2].tolist() == [[1, 3, 17], [4, 0, 2]]
    # Only the request that got its slot in this step brings its row.
    assert part["slot_rows"][0, packing.SLOT] == 3
    assert (part["slot_rows"][1:, packing.SLOT] >= 10).all()


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_there_is_room_for_every_page_that_a_step_can_start(page_size: int):
    """Each decode row one page; each segment one for every page_size tokens, rounded up."""
    of = layout(page_size=page_size)
    key = of.key
    most_of_chunk = 0
    for segments in range(1, key.segments + 1):
        lengths = [1] * (segments - 1) + [key.chunk - segments + 1]
        started = sum(-(-length // page_size) for length in lengths)
        most_of_chunk = max(most_of_chunk, started)
    assert of.parts["page_entries"][0] >= key.rows + min(most_of_chunk, key.chunk)


def test_every_upload_is_an_array_of_its_own():
    """The device may still read the last one."""
    of = layout()
    assert not np.shares_memory(pack(NOTHING, of), pack(NOTHING, of))


def test_a_result_comes_apart_into_samples_and_scores():
    key = StepKey(2, 3)
    num_samples = key.samples * packing.SAMPLE_COLUMNS
    result = np.zeros(num_samples + key.chunk * packing.SCORE_COLUMNS, np.int32)
    samples = [
        (5, packing.VALID, -0.25),
        (0, 0, 0.0),
        (319, packing.VALID | packing.STOPPED | packing.EXHAUSTED, -1e-7),
        (6, packing.VALID | packing.EXHAUSTED, float("-inf")),
        (7, packing.VALID | packing.STOPPED, -100.5),
    ]
    for index, (token_id, status, logprob) in enumerate(samples):
        at = index * packing.SAMPLE_COLUMNS
        result[at : at + 3] = (token_id, status, packing.float_bits(logprob))
    parts = result[:num_samples].reshape(-1, packing.SAMPLE_COLUMNS)
    top_logprobs = np.array([-0.5, -1.5, -2.5], np.float32)
    parts[2, packing.SAMPLE_TOP :][:3] = 11, 12, 13
    parts[2, packing.SAMPLE_TOP + MAX_TOP_LOGPROBS :][:3] = top_logprobs.view(np.int32)
    scores = np.array([-1.5, 0.0, -2.25], np.float32)
    rows = result[num_samples:].reshape(-1, packing.SCORE_COLUMNS)
    rows[:, packing.SCORE_LOGPROB] = scores.view(np.int32)
    rows[1:, packing.SCORE_TOP] = 21, 22
    rows[1:, packing.SCORE_TOP + MAX_TOP_LOGPROBS] = top_logprobs[:2].view(np.int32)
    found = unpack(key, result)
    assert found.token_ids == [token_id for token_id, _, _ in samples]
    assert found.statuses == [status for _, status, _ in samples]
    assert [found.logprob(row) for row in range(5)] == [
        float(np.float32(logprob)) for _, _, logprob in samples
    ]
    assert found.top(2, 2) == ((11, 12), (-0.5, -1.5))
    assert found.top(1, 0) == ((), ())
    assert found.chunk_logprobs(0, 3) == (-1.5, 0.0, -2.25)
    assert found.chunk_logprobs(2, 2) == ()
    assert found.chunk_top(1, 3, 1) == ((21, 22), (-0.5, -1.5))
    assert found.chunk_top(0, 3, 0) == ((), ())


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1e-45, -3.4e38, float("inf")])
def test_floats_travel_as_their_bits(value: float):
    back = np.array([packing.float_bits(value)], np.int32).view(np.float32)[0]
    assert back == np.float32(value)
    assert np.signbit(back) == np.signbit(np.float32(value))


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_words_travel_as_their_bits(value: int):
    assert np.array([packing.word_bits(value)], np.int32).view(np.uint32)[0] == value

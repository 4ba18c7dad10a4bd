"""Chunks are the largest whose step keeps the pace of what decodes beside them."""

import pytest

from octavo.engine.chunk_budget import MAX_DRIFT, MIN_DRIFT, ChunkBudget
from octavo.engine.schedule import PrefillChunk, RequestState, Schedule
from octavo.engine.step_costs import StepCosts

from .fakes import planned_costs, request, small_config

# 16, 64 and 256 tokens: steps of 1.18, 1.66 and 3.58 ms beside two rows.
CONFIG = {"max_num_seqs": 4, "prefill_chunk_tokens": 256}


def budget(target_ms: float | None, **costs: float) -> ChunkBudget:
    config = small_config(inter_token_target_ms=target_ms, **CONFIG)
    return ChunkBudget(config, planned_costs(config, **costs))


def tokens(budget: ChunkBudget, num_decodes: int = 2, computed: int = 0, kv: int = 0) -> int:
    """For a prompt of which so much is computed, beside rows with so long contexts."""
    state = RequestState(request=request("r", [1] * 5000), max_tokens=1, stop_ids=())
    state.num_computed_tokens, state.prefill_end = computed, 5000
    return budget.tokens([state], num_decodes=num_decodes, decode_kv_tokens=kv)


@pytest.mark.parametrize(
    ("target_ms", "expected"), [(None, 256), (10.0, 256), (3.0, 64), (1.5, 16), (0.5, 16)]
)
def test_the_largest_chunk_that_keeps_the_target(target_ms: float | None, expected: int):
    """Below every chunk's time prompts still advance, by the smallest."""
    assert tokens(budget(target_ms)) == expected


def test_nobody_to_keep_the_pace_for():
    """Breaks if a prompt alone is slowed down."""
    assert tokens(budget(0.5), num_decodes=0) == 256


def test_decode_rows_take_their_tokens_from_the_budget():
    config = small_config(max_num_seqs=4, prefill_chunk_tokens=8, max_num_batched_tokens=9)
    for target_ms in (None, 100.0, 0.001):
        config = small_config(
            max_num_seqs=4,
            prefill_chunk_tokens=8,
            max_num_batched_tokens=9,
            inter_token_target_ms=target_ms,
        )
        assert tokens(ChunkBudget(config, planned_costs(config)), num_decodes=4) == 5


def test_long_contexts_make_chunks_smaller():
    """Of the rows, and of the prompt itself: late chunks of a long one cost more."""
    rows = budget(10.0, decode_kv_token_s=1e-6)
    assert [tokens(rows, kv=kv) for kv in (0, 7_000, 8_500, 50_000)] == [256, 64, 16, 16]
    prompt = budget(10.0, chunk_kv_token_s=1e-8)
    assert tokens(prompt, computed=0) == 256
    assert tokens(prompt, computed=4_000) == 64


def _schedule(num_tokens: int) -> Schedule:
    state = RequestState(request=request("r", [1] * 5000), max_tokens=1, stop_ids=())
    chunk = PrefillChunk(
        state=state, start=0, length=num_tokens, is_insert=True, is_last=False, generation=1
    )
    return Schedule(decodes=(state, state), chunks=(chunk,), page_entries=())


def test_learns_how_far_predictions_are_off():
    """A device half as fast as planned gets smaller chunks, and larger ones when it recovers."""
    learns = budget(5.0)
    assert tokens(learns) == 256
    for _ in range(20):
        learns.observe(_schedule(256), 2 * 3.6e-3)
    assert tokens(learns) == 64
    for _ in range(20):
        learns.observe(_schedule(64), 1.66e-3)
    assert tokens(learns) == 256


def test_one_slow_step_does_not_change_the_pace():
    """A pause of the machine is no measure of the device."""
    learns = budget(5.0)
    learns.observe(_schedule(256), 100.0)
    assert learns._drift <= 1 + 0.2 * (MAX_DRIFT - 1)
    for _ in range(1000):
        learns.observe(_schedule(256), 0.0)
    assert learns._drift == pytest.approx(MIN_DRIFT)


def test_a_chunk_is_never_empty():
    """Breaks if a target below everything, or a full batch, stops prompts for good."""
    for chunk in (1, 2, 16, 17, 300):
        config = small_config(
            max_num_seqs=3, prefill_chunk_tokens=chunk, inter_token_target_ms=0.001
        )
        costs = StepCosts(base_s=dict.fromkeys(planned_costs(config).base_s, 1.0))
        for num_decodes in range(4):
            assert 1 <= tokens(ChunkBudget(config, costs), num_decodes) <= chunk

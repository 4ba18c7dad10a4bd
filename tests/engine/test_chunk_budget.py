"""Chunks are the largest whose step keeps the pace of what decodes beside them."""

from collections.abc import Sequence

import pytest

from octavo.configs.scheduling_config import PolicyName
from octavo.engine.chunk_budget import ChunkBudget
from octavo.engine.predictions import Predictions
from octavo.engine.schedule import PrefillChunk, RequestState, Schedule
from octavo.engine.step_costs import StepCosts

from .fakes import planned_costs, request, small_config
from .test_scheduler import Driver

# 16, 64 and 256 tokens: steps of 1.18, 1.66 and 3.58 ms beside two rows.
CONFIG = {"max_num_seqs": 4, "prefill_chunk_tokens": 256}


def budget(target_ms: float | None, policy: PolicyName = "fcfs", **costs: float) -> ChunkBudget:
    return learning_budget(target_ms, policy, **costs)[0]


def learning_budget(
    target_ms: float | None, policy: PolicyName = "fcfs", **costs: float
) -> tuple[ChunkBudget, Predictions]:
    config = small_config(inter_token_target_ms=target_ms, policy=policy, **CONFIG)
    predictions = Predictions(config, planned_costs(config, **costs))
    return ChunkBudget(config, predictions), predictions


def state(prompt: int, tpot_target_ms: float | None = None, name: str = "r") -> RequestState:
    target_s = None if tpot_target_ms is None else tpot_target_ms / 1000
    one = request(name, [1] * prompt, tpot_target_s=target_s)
    return RequestState(request=one, max_tokens=50, stop_ids=())


def tokens(
    budget: ChunkBudget,
    row_targets_ms: Sequence[float | None] = (None, None),
    computed: int = 0,
    kv: int = 0,
) -> int:
    """For a prompt of which so much is computed, beside rows with so long contexts."""
    prompt = state(5000)
    prompt.num_computed_tokens, prompt.prefill_end = computed, 5000
    rows = [state(1, target_ms) for target_ms in row_targets_ms]
    return budget.tokens([*rows, prompt], rows, decode_kv_tokens=kv)


@pytest.mark.parametrize(
    ("target_ms", "expected"), [(None, 256), (10.0, 256), (3.0, 64), (1.5, 16), (0.5, 16)]
)
def test_the_largest_chunk_that_keeps_the_target(target_ms: float | None, expected: int):
    """Below every chunk's time prompts still advance, by the smallest."""
    assert tokens(budget(target_ms)) == expected


def test_nobody_to_keep_the_pace_for():
    """Breaks if a prompt alone is slowed down."""
    assert tokens(budget(0.5, "deadline"), []) == 256


@pytest.mark.parametrize(
    ("target_ms", "row_targets_ms", "expected"),
    [
        (None, (None, None), 256),
        (None, (10.0, None), 256),
        (None, (None, 3.0), 64),
        (None, (3.0, 1.5), 16),
        (3.0, (10.0, 1.5), 16),  # both hold
        (1.5, (3.0, None), 16),
        (None, (0.5, None), 256),  # nothing keeps it
        (None, (0.5, 3.0), 64),
        (3.0, (0.5, None), 64),
        (0.5, (3.0, None), 16),
    ],
)
def test_every_row_keeps_its_target_that_can(
    target_ms: float | None, row_targets_ms: Sequence[float | None], expected: int
):
    """Breaks if a hopeless row slows prompts for nothing, or hides one that can be kept."""
    assert tokens(budget(target_ms, "deadline"), row_targets_ms) == expected


def test_whether_a_target_can_be_kept_follows_the_last_steps():
    """On a device half as fast as planned the smallest chunk takes 2.4 ms."""
    learns, predictions = learning_budget(None, "deadline")
    assert tokens(learns, (2.0, None)) == 64
    for _ in range(20):
        predictions.observe(_schedule(256), 2 * 3.6e-3)
    assert tokens(learns, (2.0, None)) == 256
    assert tokens(learns, (3.0, None)) == 16


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_other_policies_do_not_look_at_the_targets_of_rows(policy: PolicyName):
    assert tokens(budget(None, policy), (3.0, 1.5)) == 256
    assert tokens(budget(3.0, policy), (1.5, None)) == 64


@pytest.mark.parametrize(
    ("policy", "tpot_target_ms", "expected"),
    [
        ("deadline", None, [256, 256]),
        ("deadline", 1.5, [16, 16]),
        ("deadline", 0.5, [256, 256]),
        ("fcfs", 1.5, [256, 256]),
    ],
)
def test_prompts_beside_a_row_with_a_target(
    policy: PolicyName, tpot_target_ms: float | None, expected: list[int]
):
    """In the scheduler: what is under way, and a newcomer; full again once the row is gone."""
    driver = Driver(small_config(policy=policy, **CONFIG), 1000)
    row = state(1, tpot_target_ms, "row")
    driver.add(row)
    driver.step()
    driver.add(state(1000, name="prompt"))
    lengths = [[chunk.length for chunk in driver.step().chunks] for _ in range(2)]
    assert lengths == [[length] for length in expected]
    driver.scheduler.remove(row, 0.0)
    assert [chunk.length for chunk in driver.step().chunks] == [256]


def test_nothing_is_looked_at_while_rows_only_decode(monkeypatch: pytest.MonkeyPatch):
    """Also while others wait for a slot: that is how most steps are."""
    driver = Driver(small_config(policy="deadline", **CONFIG), 1000)
    driver.add(*(state(1, 3.0, f"r{number}") for number in range(6)))
    driver.step()
    driver.step()
    monkeypatch.setattr(driver.scheduler, "_budget", None)
    for _ in range(20):
        schedule = driver.scheduler.schedule(0.0)
        assert schedule is not None
        assert (len(schedule.decodes), len(driver.scheduler.waiting)) == (4, 2)
        driver.unread.append(schedule)


def test_decode_rows_take_their_tokens_from_the_budget():
    config = small_config(max_num_seqs=4, prefill_chunk_tokens=8, max_num_batched_tokens=9)
    for target_ms in (None, 100.0, 0.001):
        config = small_config(
            max_num_seqs=4,
            prefill_chunk_tokens=8,
            max_num_batched_tokens=9,
            inter_token_target_ms=target_ms,
        )
        predictions = Predictions(config, planned_costs(config))
        assert tokens(ChunkBudget(config, predictions), [None] * 4) == 5


def test_long_contexts_make_chunks_smaller():
    """Of the rows, and of the prompt itself: late chunks of a long one cost more."""
    rows = budget(10.0, decode_kv_token_s=1e-6)
    assert [tokens(rows, kv=kv) for kv in (0, 7_000, 8_500, 50_000)] == [256, 64, 16, 16]
    prompt = budget(10.0, chunk_kv_token_s=1e-8)
    assert tokens(prompt, computed=0) == 256
    assert tokens(prompt, computed=4_000) == 64


def _schedule(num_tokens: int) -> Schedule:
    one = state(5000)
    chunk = PrefillChunk(
        state=one, start=0, length=num_tokens, is_insert=True, is_last=False, generation=1
    )
    return Schedule(decodes=(one, one), chunks=(chunk,), page_entries=())


def test_learns_how_far_predictions_are_off():
    """A device half as fast as planned gets smaller chunks, and larger ones when it recovers."""
    learns, predictions = learning_budget(5.0)
    assert tokens(learns) == 256
    for _ in range(20):
        predictions.observe(_schedule(256), 2 * 3.6e-3)
    assert tokens(learns) == 64
    for _ in range(20):
        predictions.observe(_schedule(64), 1.66e-3)
    assert tokens(learns) == 256


def test_a_chunk_is_never_empty():
    """Breaks if a target below everything, or a full batch, stops prompts for good."""
    for chunk in (1, 2, 16, 17, 300):
        config = small_config(
            max_num_seqs=3, prefill_chunk_tokens=chunk, inter_token_target_ms=0.001
        )
        costs = StepCosts(base_s=dict.fromkeys(planned_costs(config).base_s, 1.0))
        for num_decodes in range(4):
            learns = ChunkBudget(config, Predictions(config, costs))
            assert 1 <= tokens(learns, [None] * num_decodes) <= chunk

"""Predictions are sums of what was measured: the executable, and the contexts that are read."""

import itertools

import pytest

from octavo.engine.step_costs import StepCosts, chunk_kv_tokens
from octavo.engine.step_shapes import StepKey

COSTS = StepCosts(
    base_s={
        StepKey(2, 0): 0.5,
        StepKey(8, 0): 0.75,
        StepKey(2, 16): 1.0,
        StepKey(2, 64): 3.0,
        StepKey(8, 64): 5.0,
    },
    decode_kv_token_s=0.001,
    chunk_kv_token_s=0.0001,
    import_page_s=0.25,
    import_s=2.0,
)


def test_a_step_costs_its_executable_and_the_contexts():
    assert COSTS.step_s(StepKey(8, 0)) == 0.75
    assert COSTS.step_s(StepKey(8, 0), decode_kv_tokens=1000) == pytest.approx(1.75)
    assert COSTS.step_s(StepKey(2, 16), chunk_kv_tokens=10_000) == pytest.approx(2.0)


def test_only_what_was_measured_is_known():
    with pytest.raises(KeyError):
        COSTS.step_s(StepKey(4, 0))


def test_a_prompt_alone_runs_in_the_largest_chunks_with_the_fewest_rows():
    """Breaks if rows that are not there are paid for."""
    assert COSTS.prefill_tokens_per_s == pytest.approx(64 / 3.0)
    assert COSTS.prefill_s(0, 64) == pytest.approx(3.0 + 64 * 32 * 0.0001)
    assert COSTS.prefill_s(64, 128) == pytest.approx(3.0 + 64 * 96 * 0.0001)
    assert COSTS.prefill_s(0, 16) == pytest.approx(0.75 + 16 * 8 * 0.0001)
    assert COSTS.prefill_s(40, 40) == 0.0


def test_a_prompt_in_parts_costs_what_it_costs_at_once():
    """What is cached is taken off: breaks if a later part is as cheap as the first."""
    whole = COSTS.prefill_s(0, 1000)
    for cut in (1, 16, 500, 999):
        assert COSTS.prefill_s(0, cut) + COSTS.prefill_s(cut, 1000) == pytest.approx(whole)
    assert COSTS.prefill_s(500, 1000) > COSTS.prefill_s(0, 500)


def test_bringing_pages_back_costs_once_and_for_each():
    assert [COSTS.import_pages_s(n) for n in (0, 1, 4)] == [0.0, 2.25, 3.0]


def test_contexts_of_a_chunk_are_those_of_its_tokens():
    for start, length in itertools.product((0, 1, 7), (0, 1, 5)):
        expected = sum(start + at + 1 for at in range(length))
        assert chunk_kv_tokens(start, length) == expected

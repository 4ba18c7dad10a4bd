"""Penalties, bias and bans against the float64 oracle, to the rounding of float32.

What would break these: another order, a penalty that looks at the wrong part of the history, a
positive logit that is treated as a negative one, a bit of another id, anything stale that is read.
"""

from typing import Any

import jax
import numpy as np
import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine import logit_rules, packing
from octavo.engine.admission import EngineLimits, admit
from octavo.engine.rule_entries import rule_entries
from octavo.engine.sampling_params import SamplingParams

from .fakes import request
from .random_rows import random_logits, random_rules
from .sampler_rows import MOST_TIMES, PADDING, Row, arrays

_apply = jax.jit(logit_rules.apply_rules)

# Each of the at most five steps rounds once, relative to the largest number on the way.
ROUNDINGS = 5


def apply(logits: np.ndarray, rows: list[Row]) -> np.ndarray:
    _, rules, tables = arrays(rows, logits.shape[1])
    return np.asarray(_apply(logits, rules, tables))


def assert_equals_the_oracle(found: np.ndarray, row: Row, logits: np.ndarray) -> None:
    expected, sampling = row.ruled(logits), row.sampling
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    is_finite = np.isfinite(expected)
    times = np.bincount(np.array(row.output, np.int64), minlength=len(logits))
    size = np.where(is_finite, np.abs(logits), 0)
    size = np.maximum(size, np.where(is_finite, np.abs(expected), 0))
    size[[*row.prompt, *row.output]] *= max(
        1.0, sampling.repetition_penalty, 1 / sampling.repetition_penalty
    )
    size += abs(sampling.frequency_penalty) * times + abs(sampling.presence_penalty)
    for token_id, bias in sampling.logit_bias:
        size[token_id] += abs(bias)
    error = np.abs(found[is_finite] - expected[is_finite])
    assert (error <= ROUNDINGS * np.finfo(np.float32).eps * size[is_finite]).all(), row
    # What no rule touches is no other number, not even by rounding.
    touched = [*row.prompt, *row.output, *(token_id for token_id, _ in sampling.logit_bias)]
    is_untouched = is_finite.copy()
    is_untouched[touched] = False
    np.testing.assert_array_equal(found[is_untouched], logits[is_untouched])


@pytest.mark.parametrize("vocab", [10, 257, 1000])
def test_equals_the_oracle(vocab: int):
    rng = np.random.default_rng(vocab)
    num_changed = 0
    for _ in range(20):
        logits = np.stack([random_logits(rng, vocab) for _ in range(32)])
        rows = [
            Row(
                sampling=SamplingParams(**random_rules(rng, vocab)),
                prompt=tuple(rng.integers(0, vocab, rng.integers(1, 12)).tolist()),
                output=tuple(rng.integers(0, vocab, rng.integers(0, 40)).tolist()),
                position=int(rng.integers(4)),
            )
            for _ in range(32)
        ]
        found = apply(logits, rows)
        for number, row in enumerate(rows):
            assert_equals_the_oracle(found[number], row, logits[number])
            num_changed += not np.array_equal(found[number], logits[number])
    assert num_changed > 0.8 * 20 * 32


def test_all_rules_at_once_in_their_order():
    """Values that float32 holds exactly: any other order gives another number."""
    logits = np.zeros((2, 64), np.float32)
    logits[:, :8] = [8, -8, 8, -8, 8, 8, 8, 8]
    row = Row(
        sampling=SamplingParams(
            repetition_penalty=2.0,
            frequency_penalty=0.5,
            presence_penalty=1.0,
            logit_bias=((2, 16.0), (3, 16.0), (6, 100.0), (7, 100.0)),
            banned_token_ids=(6,),
            min_tokens=3,
            stop_token_ids=(7,),
        ),
        prompt=(0, 1, 5),
        output=(2, 3, 3, 5, 5, 5, 0),
        position=2,
    )
    expected = [
        4 - 0.5 - 1,  # in the prompt, and in the output once
        -16,  # in the prompt only
        4 - 0.5 - 1 + 16,
        -16 - 2 * 0.5 - 1 + 16,  # the bias does not turn it into a positive one first
        8,
        4 - 3 * 0.5 - 1,
        -np.inf,
        -np.inf,
    ]
    for found in apply(logits, [row, row]):
        assert found[:8].tolist() == expected
        assert not found[8:].any()


@pytest.mark.parametrize(
    ("rules", "prompt_only", "output_once", "output_thrice", "both"),
    [
        ({"repetition_penalty": 4.0}, 2, 2, 2, 2),
        ({"frequency_penalty": 0.5}, 8, 7.5, 6.5, 7.5),
        ({"presence_penalty": 0.5}, 8, 7.5, 7.5, 7.5),
        ({"frequency_penalty": -2.0}, 8, 10, 14, 10),
        ({"presence_penalty": -2.0}, 8, 10, 10, 10),
    ],
    ids=str,
)
def test_what_of_the_history_counts(
    rules: dict[str, Any],
    prompt_only: float,
    output_once: float,
    output_thrice: float,
    both: float,
):
    """Failure case 3.7: repetition sees prompt and output, the others the output only.

    An id counts once however often the prompt has it; id 0, which padding has, is in neither.
    """
    logits = np.full((3, 33), 8.0, np.float32)
    row = Row(sampling=SamplingParams(**rules), prompt=(9, 9, 9, 32), output=(31, 20, 20, 20, 32))
    found = apply(logits, [PADDING, row, PADDING])
    assert found[1, [9, 31, 20, 32]].tolist() == [prompt_only, output_once, output_thrice, both]
    others = np.delete(found[1], [9, 31, 20, 32])
    assert (others == 8.0).all()
    assert (found[[0, 2]] == 8.0).all()


def test_counts_stop_at_their_most():
    """16 bits: an id that was said more often than they count is no id that was never said."""
    logits = np.zeros((2, 40), np.float32)
    sampling = SamplingParams(frequency_penalty=0.5)
    rows = [Row(sampling=sampling, output=(5,) * times) for times in (MOST_TIMES, MOST_TIMES + 9)]
    assert apply(logits, rows)[:, 5].tolist() == [-0.5 * MOST_TIMES] * 2


@pytest.mark.parametrize("vocab", [31, 32, 33, 64, 65])
def test_every_bit_of_a_mask_is_its_own_id(vocab: int):
    """Each id alone, and all but it; bits past the vocabulary mean nothing."""
    every = range(vocab)
    alone = [Row(sampling=SamplingParams(allowed_token_ids=(token_id,))) for token_id in every]
    without = [Row(sampling=SamplingParams(banned_token_ids=(token_id,))) for token_id in every]
    found = apply(np.ones((2 * vocab, vocab), np.float32), alone + without)
    is_one = np.eye(vocab, dtype=bool)
    np.testing.assert_array_equal(found == 1, np.concatenate([is_one, ~is_one]))
    assert np.isneginf(found[found != 1]).all()


def test_rules_leave_infinities_and_broken_numbers_to_the_sampler():
    """They turn no NaN into a number, and no id that is impossible into a possible one."""
    logits = np.array([[np.nan, -np.inf, np.inf, 1.0]] * 2, np.float32)
    sampling = SamplingParams(
        repetition_penalty=0.5,
        frequency_penalty=-2.0,
        presence_penalty=-2.0,
        logit_bias=tuple((token_id, 100.0) for token_id in range(4)),
    )
    row = Row(sampling=sampling, prompt=(0, 1, 2, 3), output=(0, 1, 2, 3))
    found = apply(logits, [row, PADDING])
    np.testing.assert_array_equal(found[0], [np.nan, -np.inf, np.inf, 2 + 2 + 2 + 100])
    np.testing.assert_array_equal(found[1], logits[1])


def test_entries_are_the_history():
    """Failure case 3.7: counts come from token ids, of however many were computed so far."""
    sampling = {"repetition_penalty": 1.5, "logit_bias": ((6, 2.5), (0, -1.0))}
    one = request("a", (3, 5, 3), **sampling)
    limits = EngineLimits(vocab_size=40, max_model_len=64, num_pages=64, eos_token_ids=())
    state = admit(one, EngineConfig(), limits)
    state.slot = 2
    state.output_token_ids += [5, 9, 9]
    counts = {entry.token_id: entry.value for entry in rule_entries(state) if entry.column < 0}
    assert counts == {3: 1, 5: 0b11, 9: 0b100}
    biases = [
        (entry.column, entry.token_id, entry.value)
        for entry in rule_entries(state)
        if entry.column >= 0
    ]
    assert biases == [(0, 6, packing.float_bits(2.5)), (1, 0, packing.float_bits(-1.0))]
    assert {entry.slot for entry in rule_entries(state)} == {2}

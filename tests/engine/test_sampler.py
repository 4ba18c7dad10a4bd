"""The sampler against an oracle that sorts, over random and adversarial rows with every rule.

What would break these: another order of the rules, a border that keeps one more or one less, ties
decided by place in a block, a rule that leaks from row to row or reads what is stale in a table.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine import sampler, truncation
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.vocabulary_blocks import in_blocks

from . import sampling_oracle as oracle
from .random_rows import random_logits, random_row, random_rules, random_truncation
from .sampler_rows import GREEDY, PADDING, RULES, Row, arrays, sample

_sample = jax.jit(sampler.sample)

CLEAR = 1e-6  # margins below it may be decided by the rounding of float32 sums
# Rules are applied in float32 here and in float64 there. Two tokens whose scaled logits are closer
# than this may stand in the other order.
CLEAR_BORDER = 1e-5


@pytest.mark.parametrize("vocab", [10, pytest.param(64, marks=pytest.mark.full), 100, 1000])
def test_equals_the_oracle(vocab: int):
    rng = np.random.default_rng(vocab)
    num_rows, num_batches = 64, 10
    num_clear = num_sure = num_wide = num_drawn = 0
    for _ in range(num_batches):
        logits = np.stack([random_logits(rng, vocab) for _ in range(num_rows)])
        rows = [random_row(rng, vocab) for _ in range(num_rows)]
        tokens, is_broken = sample(logits, rows)
        for number, row in enumerate(rows):
            sampling, ruled = row.sampling, row.ruled(logits[number])
            assert is_broken[number] == (ruled.max() == -np.inf)
            if is_broken[number]:  # the only possible id is ruled out
                continue
            num_sure += 1
            expected = oracle.draw(ruled, sampling, position=row.position, choice=row.choice)
            has_rules = not np.array_equal(ruled, logits[number])
            if sampling.temperature == 0:
                is_clear = not has_rules or not 0 < expected.margin < CLEAR_BORDER
            else:
                is_clear = expected.margin > CLEAR and (
                    not has_rules or not 0 < expected.border_gap < CLEAR_BORDER
                )
                kept, *_ = oracle.survivors(ruled, sampling)
                num_drawn += 1
                num_wide += len(kept) > truncation.NARROW
            if is_clear:
                assert tokens[number] == expected.token, (row, logits[number])
                num_clear += 1
    assert num_sure > 0.9 * num_rows * num_batches
    assert num_clear > 0.9 * num_sure
    if vocab > 2 * truncation.NARROW:
        assert 0.1 < num_wide / num_drawn < 0.9, "one of the two ways is hardly tried"


def drawn(**sampling: Any) -> SamplingParams:
    return SamplingParams(**sampling)


def test_few_survivors_are_drawn_without_a_pass_over_the_vocabulary():
    """The narrow way knows when it suffices: else every row would take the slow way, unseen."""
    vocab, wanted = 1000, [drawn(top_p=0.9), drawn(top_k=40), drawn(min_p=0.1), drawn(top_k=40)]
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, (4, vocab)).astype(np.float32)
    logits[3] = 0.0  # the 40 kept are equals of 960 others: only the wide way knows which
    rows, _, _ = arrays([Row(sampling=sampling) for sampling in wanted], vocab)

    @jax.jit
    def suffices(logits: jax.Array) -> jax.Array:
        blocks = in_blocks(logits)
        likelihood = jnp.exp(blocks - blocks.max((1, 2), keepdims=True))
        chance = jnp.zeros(4, jnp.float32)
        wanted = rows.for_vocabulary(vocab)
        return truncation.draw_narrow(blocks, blocks.max(-1), likelihood, wanted, chance)[1]

    assert suffices(jnp.asarray(logits)).tolist() == [True, True, True, False]


# A rule that changes nothing, but sends a row the way of rows with rules.
NO_CHANGE = {"logit_bias": ((0, 0.0),)}


# Values and sums that float32 holds exactly, so that not even a margin of zero excuses anything.
@pytest.mark.parametrize(
    ("truncation", "num_kept"),
    [
        ({}, 128),
        ({"top_k": -1}, 128),
        ({"top_k": 127}, 127),
        ({"top_k": 128}, 128),
        ({"top_k": 129}, 128),
        ({"top_k": 2**31 - 1}, 128),
        ({"top_k": 1}, 1),
        ({"top_k": 65}, 65),
        ({"top_p": 0.5}, 64),
        ({"top_p": 0.75}, 96),
        ({"top_p": 1e-6}, 1),
        ({"top_k": 100, "top_p": 1e-300}, 1),  # 0 in float32
        ({"top_p": 0.999999}, 128),
        ({"top_k": 100, "top_p": 0.5}, 50),  # renormalised: half of the 100, not 64
        ({"top_k": 32, "top_p": 0.25, "min_p": 1.0}, 8),
        ({"min_p": 1.0}, 128),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("temperature", "rules"),
    [(1e-6, {}), (0.7, {}), (100.0, {}), (0.7, NO_CHANGE)],
    ids=["1e-6", "0.7", "100", "0.7 with rules"],
)
def test_of_equals_the_lowest_ids_survive_and_exactly_as_many_as_asked(
    truncation: dict[str, Any], num_kept: int, temperature: float, rules: dict[str, Any]
):
    """All logits equal: every one of the survivors comes up in 2,000 draws, and no other."""
    num_rows = 2000
    sampling = SamplingParams(**truncation, **rules, temperature=temperature)
    rows, its_rules, tables = arrays([Row(sampling=sampling)] * num_rows, 128)
    rows = replace(rows, seed=rows.seed.at[:, 0].set(jnp.arange(num_rows, dtype=jnp.uint32)))
    tokens, _ = _sample(jnp.full((num_rows, 128), 2.5, jnp.float32), rows, its_rules, tables)
    assert set(tokens.tolist()) == set(range(num_kept))


# Seeds, found by search, whose number at position 0 lies exactly on a border, or at either end.
_SEED_OF = {
    0.0: 4166419,
    0.25: 17972050,
    0.5: 103223,
    0.75: 15397269,
    1 - 2.0**-24: 17762771,
}


@pytest.mark.parametrize("num_equal", [8, 512])
@pytest.mark.parametrize(
    ("truncation", "share"),
    [
        ({}, 1.0),
        ({"top_p": 0.5}, 0.5),
        ({"top_p": 0.75, "min_p": 1.0}, 0.75),
        ({"min_p": 1.0}, 1.0),
        ({"temperature": 0.3, "top_p": 0.25}, 0.25),
        ({"top_k": 8}, None),
        ({"top_k": 4}, None),
        ({"top_k": 4, "top_p": 0.5}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("rules", [{}, NO_CHANGE], ids=["no rules", "rules"])
def test_borders_are_exact(
    num_equal: int, truncation: dict[str, Any], share: float | None, rules: dict[str, Any]
):
    """Equal tokens scattered among impossible ones: masses, targets and borders are exact.

    The token is the first whose cumulative mass exceeds the number; a border belongs to the token
    after it, a number of 0 to the first that has mass. Eight are drawn the narrow way, 512 not.
    """
    logits = np.full(1000, -np.inf, np.float32)
    equal = np.sort(np.random.default_rng(6).permutation(999)[:num_equal] + 1)
    logits[equal] = 2.5
    if share is not None:
        num_kept = round(num_equal * share)
    else:
        num_kept = 2 if "top_p" in truncation else min(num_equal, truncation["top_k"])
    seeds = list(_SEED_OF.values())
    assert [oracle.uniform(seed, 0) for seed in seeds] == list(_SEED_OF)
    rows = [Row(sampling=SamplingParams(**truncation, **rules, seed=seed)) for seed in seeds]
    tokens, is_broken = sample(np.tile(logits, (5, 1)), rows)
    assert tokens.tolist() == [equal[int(chance * num_kept)] for chance in _SEED_OF]
    assert not is_broken.any()


@pytest.mark.parametrize("rules", [{}, NO_CHANGE], ids=["no rules", "rules"])
def test_top_k_of_one_is_greedy(rules: dict[str, Any]):
    rng = np.random.default_rng(1)
    logits = np.stack([random_logits(rng, 100) for _ in range(64)])
    one = [
        Row(sampling=SamplingParams(temperature=1.3, top_k=1, seed=row, **rules), position=row)
        for row in range(64)
    ]
    greedy = Row(sampling=replace(GREEDY, **rules))
    np.testing.assert_array_equal(sample(logits, one)[0], logits.argmax(-1))
    np.testing.assert_array_equal(sample(logits, [greedy] * 64)[0], logits.argmax(-1))


@pytest.mark.parametrize("rules", [{}, NO_CHANGE], ids=["no rules", "rules"])
@pytest.mark.parametrize(
    ("low", "temperature"), [(0.001, 1.0), (0.5, 2.0), (5.0, 20.0), (-5.0, 20.0), (1e30, 100.0)]
)
def test_top_k_of_one_takes_the_highest_logit_however_close(
    low: float, temperature: float, rules: dict[str, Any]
):
    """Neighbours among the numbers of float32, the higher one at the higher id.

    Fails if top-k compares likelihoods, in which the two are equal.
    """
    logits = np.full((2, 100), low - 1.0, np.float32)
    logits[:, 3] = low
    logits[:, 60] = np.nextafter(np.float32(low), np.float32(np.inf))
    row = Row(sampling=SamplingParams(temperature=temperature, top_k=1, **rules))
    tokens, _ = sample(logits, [row, row])
    assert tokens.tolist() == [60, 60]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, 3),
        ({"banned_token_ids": (3,)}, 8),
        ({"allowed_token_ids": (70, 90, 8, 1)}, 8),
        ({"logit_bias": ((8, 0.5), (70, 0.5))}, 8),
        ({"logit_bias": ((1, 1.0), (3, -1.0))}, 1),
        ({"logit_bias": ((3, -0.5), (8, -0.5), (70, -0.5), (90, -0.5), (5, 1.5), (2, 1.5))}, 2),
        ({"repetition_penalty": 2.0}, 70),  # 3 in the prompt, 8 in the output
        ({"presence_penalty": 0.5}, 3),
        ({"presence_penalty": 0.5, "banned_token_ids": (3,)}, 70),
        ({"frequency_penalty": -0.25}, 8),
        ({"frequency_penalty": -0.25, "presence_penalty": 0.5}, 3),
        ({"min_tokens": 1, "stop_token_ids": (3, 70)}, 8),
        ({"min_tokens": 1, "stop_token_ids": (3, 70), "presence_penalty": 0.5}, 90),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_takes_the_lowest_of_equals_after_the_rules(
    rules: dict[str, Any], expected: int, temperature: float
):
    """Values that float32 holds exactly, so that rules make ties and break them."""
    logits = np.zeros((2, 100), np.float32)
    logits[:, [3, 8, 70, 90]] = 1.5
    logits[:, 1] = 0.5
    sampling = SamplingParams(temperature=temperature, top_k=1, **rules)
    row = Row(sampling=sampling, prompt=(3,), output=(8, 8))
    tokens, _ = sample(logits, [row, row])
    assert tokens.tolist() == [expected] * 2


def test_a_row_does_not_depend_on_its_batch():
    """Alone among padding of any content, in another place, beside any rules: the same token."""
    rng = np.random.default_rng(2)
    num_rows, vocab = 64, 1000
    logits = np.stack([random_logits(rng, vocab) for _ in range(num_rows)])
    rows = [random_row(rng, vocab) for _ in range(num_rows)]
    together = np.stack(sample(logits, rows))
    order = rng.permutation(num_rows).tolist()
    moved = np.stack(sample(logits[order], [rows[i] for i in order]))
    np.testing.assert_array_equal(moved, together[:, order])
    for number in range(num_rows):
        for garbage in (np.nan, np.inf, -np.inf, 1e30):
            beside = np.full_like(logits, garbage)
            place = (number * 7) % num_rows
            beside[place] = logits[number]
            padded = [PADDING] * num_rows
            padded[place] = rows[number]
            alone = np.stack(sample(beside, padded))
            np.testing.assert_array_equal(alone[:, place], together[:, number], err_msg=str(rows))


@pytest.mark.parametrize("name", RULES)
def test_a_seeded_row_is_the_same_beside_every_rule(name: str):
    """Failure case 3.3: the neighbours have a rule, with a seed or none, or are broken by it."""
    rng = np.random.default_rng(7)
    num_rows, vocab = 8, 100
    logits = rng.normal(0, 2, (num_rows, vocab)).astype(np.float32)
    options = {**random_truncation(rng, vocab), "temperature": 1.3}
    while name not in options:
        options |= random_rules(rng, vocab)
    beside: dict[str, Any] = {name: options[name]}
    if name == "min_tokens":
        beside["stop_token_ids"] = (1, 2)
    seeded = [
        Row(sampling=SamplingParams(seed=42), prompt=(1, 2), output=(3, 3)),
        Row(sampling=SamplingParams(seed=42, top_k=20, presence_penalty=1.0), output=(3, 3)),
    ]
    for row in seeded:
        tokens = set()
        for place in range(num_rows):
            for temperature in (0.0, 0.8):
                neighbour = SamplingParams(**{"temperature": temperature, **beside, "seed": place})
                rows = [Row(sampling=neighbour, prompt=(3,), output=(1, 1))] * num_rows
                rows[place] = row
                mixed = logits.copy()
                mixed[place] = logits[0]
                mixed[(place + 1) % num_rows, ::2] = np.nan
                token, is_broken = sample(mixed, rows)
                assert is_broken.tolist() == [at == (place + 1) % num_rows for at in range(8)]
                tokens.add(int(token[place]))
        assert len(tokens) == 1


def _with(logits: np.ndarray, place: int | slice, value: float) -> np.ndarray:
    changed = logits.copy()
    changed[place] = value
    return changed


EVERYTHING_BANNED = {"banned_token_ids": tuple(range(100))}


@pytest.mark.parametrize("rules", [{}, NO_CHANGE], ids=["no rules", "rules"])
@pytest.mark.parametrize(
    "truncation",
    [GREEDY, drawn(), drawn(top_k=5), drawn(top_p=0.9), drawn(min_p=0.1), drawn(temperature=1e-6)],
    ids=["greedy", "whole", "top_k", "top_p", "min_p", "cold"],
)
def test_exactly_the_rows_that_mean_nothing_are_broken(
    truncation: SamplingParams, rules: dict[str, Any]
):
    """NaN and infinity anywhere, or no id left; never a row with one possible id."""
    vocab = 100
    plain = np.random.default_rng(3).normal(0, 3, vocab).astype(np.float32)
    only = np.full(vocab, -np.inf, np.float32)
    only[11] = -3e38
    sampling = replace(truncation, **rules)
    allowed = tuple(range(0, vocab, 2))
    stops: dict[str, Any] = {"min_tokens": 1, "stop_token_ids": (11,)}
    cases: list[tuple[np.ndarray, dict[str, Any], bool]] = [
        (plain, {}, False),
        (_with(plain, slice(None), np.nan), {}, True),
        (_with(plain, 0, np.nan), {}, True),
        (_with(plain, 99, np.nan), {}, True),
        (_with(plain, 17, np.inf), {}, True),
        (_with(plain, slice(None), np.inf), {}, True),
        (_with(plain, slice(None), -np.inf), {}, True),
        (_with(plain, slice(1, None), -np.inf), {}, False),
        (only, {}, False),
        (plain, EVERYTHING_BANNED, True),
        (plain, {"banned_token_ids": tuple(range(99))}, False),
        (plain, {"allowed_token_ids": ()}, True),
        (only, {"allowed_token_ids": (11,)}, False),
        (only, {"allowed_token_ids": allowed}, True),
        (only, {"banned_token_ids": (11,)}, True),
        (only, stops, True),
        (plain, {**stops, "allowed_token_ids": (11,)}, True),
        (plain, {**stops, "allowed_token_ids": (11, 12)}, False),
        # A rule does not hide that the model's logits are no logits.
        (_with(plain, 17, np.nan), {"banned_token_ids": (17,)}, True),
        (_with(plain, 17, np.inf), {"allowed_token_ids": allowed}, True),
        (_with(plain, 11, np.nan), stops, True),
        # Nor does it break what is finite.
        (_with(plain, slice(None), 3e38), {"logit_bias": ((1, -100.0),)}, False),
        (only, {"repetition_penalty": 0.5, "presence_penalty": 2.0}, False),
    ]
    rows = [Row(sampling=replace(sampling, **extra), output=(11, 11)) for _, extra, _ in cases]
    logits = np.stack([row for row, _, _ in cases])
    tokens, is_broken = sample(logits, rows)
    assert is_broken.tolist() == [expected for _, _, expected in cases]
    assert (tokens >= 0).all()
    assert (tokens < vocab).all()
    assert tokens[8] == tokens[12] == tokens[22] == 11


@pytest.mark.parametrize("vocab", [10, 100, 1000])
@pytest.mark.parametrize("bad", ["one NaN", "all NaN", "inf", "all -inf"])
def test_a_broken_row_yields_an_id_and_disturbs_nobody(vocab: int, bad: str):
    rng = np.random.default_rng(3)
    num_rows = 64
    logits = np.stack([random_logits(rng, vocab) for _ in range(num_rows)])
    rows = [random_row(rng, vocab) for _ in range(num_rows)]
    healthy = np.stack(sample(logits, rows))
    broken = logits.copy()
    value = {"one NaN": np.nan, "all NaN": np.nan, "inf": np.inf, "all -inf": -np.inf}[bad]
    broken[::2, 3 if bad in ("one NaN", "inf") else slice(None)] = value
    tokens, is_broken = sample(broken, rows)
    np.testing.assert_array_equal((tokens[1::2], is_broken[1::2]), healthy[:, 1::2])
    assert is_broken[::2].all()
    assert tokens.min() >= 0
    assert tokens.max() < vocab


def test_the_random_numbers_are_threefry():
    """Known answers of the paper's authors for the oracle; the device agrees with the oracle."""
    ones = 0xFFFFFFFF
    assert oracle.threefry_2x32((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert oracle.threefry_2x32((ones, ones), (ones, ones)) == (0x1CB996FC, 0xBB002BE7)
    pi_key, pi_counter = (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)
    assert oracle.threefry_2x32(pi_key, pi_counter) == (0xC4923A9C, 0x483DF7A0)

    cases = [
        (seed, position, choice)
        for seed in (0, 1, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1)
        for position in (0, 1, 2**24 + 1)
        for choice in (0, 1, 127)
    ]
    rows, _, _ = arrays(
        [
            Row(sampling=SamplingParams(seed=seed), position=position, choice=choice)
            for seed, position, choice in cases
        ],
        32,
    )
    found = np.asarray(sampler.uniform(rows.seed, rows.position, rows.choice))
    expected = [oracle.uniform(*case) for case in cases]
    assert found.tolist() == expected
    assert len(set(expected)) == len(expected), "all three count, the seed's high word included"


def test_choices_draw_apart():
    """Same seed, position and logits: choices differ; and nothing but the three decides."""
    vocab, num_choices = 1000, 64
    logits = np.zeros((num_choices, vocab), np.float32)
    rows = [
        Row(sampling=SamplingParams(seed=42), position=5, choice=choice)
        for choice in range(num_choices)
    ]
    tokens, _ = sample(logits, rows)
    chances = [oracle.uniform(42, 5, choice) for choice in range(num_choices)]
    assert tokens.tolist() == [int(chance * vocab) for chance in chances]
    assert len(set(tokens.tolist())) > 0.9 * num_choices

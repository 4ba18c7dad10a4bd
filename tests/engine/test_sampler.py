"""The sampler against an oracle that sorts, over random and adversarial rows; and its statistics.

What would break these: another order of the rules, a border that keeps one more or one less, ties
decided by place in a block, a rule that leaks from row to row, a bias of the random numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine import sampler
from octavo.engine.sampler import SamplingRows

from . import sampling_oracle as oracle

CLEAR = 1e-6  # margins below it may be decided by the rounding of float32 sums

_sample = jax.jit(sampler.sample)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Parameters of one row; the defaults are plain sampling."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Rule(temperature=0.0)


def sampling_rows(
    rules: Sequence[Rule], seeds: Sequence[int], positions: Sequence[int]
) -> SamplingRows:
    words = [[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds]
    return SamplingRows(
        temperature=jnp.array([rule.temperature for rule in rules], jnp.float32),
        top_k=jnp.array([rule.top_k for rule in rules], jnp.int32),
        top_p=jnp.array([rule.top_p for rule in rules], jnp.float32),
        min_p=jnp.array([rule.min_p for rule in rules], jnp.float32),
        seed=jnp.array(words, jnp.uint32),
        position=jnp.array(positions, jnp.int32),
    )


def sample(
    logits: np.ndarray, rules: Sequence[Rule], seeds: Sequence[int], positions: Sequence[int]
) -> np.ndarray:
    return np.asarray(_sample(jnp.asarray(logits), sampling_rows(rules, seeds, positions)))


def _random_rule(rng: np.random.Generator, vocab: int) -> Rule:
    """Any combination; extremes as often as ordinary values."""
    everything = [vocab - 1, vocab, vocab + 1, 2**31 - 1]
    return Rule(
        temperature=rng.choice([0.0, 1e-6, 0.1, 0.7, 1.0, 1.5, 100.0]),
        top_k=int(rng.choice([0, 0, 1, 2, 5, 40, 63, 64, 65, 100, *everything])),
        top_p=rng.choice([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999999]),
        min_p=rng.choice([0.0, 0.0, 1e-6, 0.01, 0.1, 0.5, 1.0]),
    )


def _random_logits(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Of one row: flat, peaked, tied in various ways, partly or nearly all impossible."""
    kind = rng.integers(8)
    logits = rng.normal(0, rng.choice([0.01, 1.0, 5.0, 30.0]), vocab)
    if kind == 0:
        logits[:] = rng.normal()
    elif kind == 1:  # a few values only: ties everywhere
        logits = np.round(logits * rng.choice([0.3, 1.0]))
    elif kind == 2:  # one high, all others tied
        logits[:] = -1.0
        logits[rng.integers(vocab)] = 3.0
    elif kind == 3:  # many tied at the top, scattered over the blocks
        logits[rng.permutation(vocab)[: vocab // 2]] = logits.max()
    elif kind == 4:
        logits[rng.permutation(vocab)[: vocab // 2]] = -np.inf
    elif kind == 5:
        only = rng.integers(vocab)
        logits[np.arange(vocab) != only] = -np.inf
    elif kind == 6:
        logits[rng.integers(vocab)] += 1e4
    return logits.astype(np.float32)


@pytest.mark.parametrize("vocab", [10, 64, 100, 1000])
def test_equals_the_oracle(vocab: int):
    rng = np.random.default_rng(vocab)
    num_rows, num_batches = 64, 25
    num_clear = num_wide = num_drawn = 0
    for _ in range(num_batches):
        logits = np.stack([_random_logits(rng, vocab) for _ in range(num_rows)])
        rules = [_random_rule(rng, vocab) for _ in range(num_rows)]
        seeds = rng.integers(0, 2**64, num_rows, np.uint64).tolist()
        positions = rng.integers(0, 4096, num_rows).tolist()
        tokens = sample(logits, rules, seeds, positions)
        for row, rule in enumerate(rules):
            expected = oracle.draw(
                logits[row], **vars(rule), seed=seeds[row], position=positions[row]
            )
            if rule.temperature == 0 or expected.margin > CLEAR:
                assert tokens[row] == expected.token, (rule, logits[row])
                num_clear += 1
            if rule.temperature > 0:
                kept, *_ = oracle.survivors(logits[row], **vars(rule))
                num_drawn += 1
                num_wide += len(kept) > sampler.NARROW
    assert num_clear > 0.9 * num_rows * num_batches
    if vocab > 2 * sampler.NARROW:
        assert 0.1 < num_wide / num_drawn < 0.9, "one of the two ways is hardly tried"


def test_few_survivors_are_drawn_without_a_pass_over_the_vocabulary():
    """The narrow way knows when it suffices: else every row would take the slow way, unseen."""
    vocab, rules = 1000, [Rule(top_p=0.9), Rule(top_k=40), Rule(min_p=0.1), Rule(top_k=40)]
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, (4, vocab)).astype(np.float32)
    logits[3] = 0.0  # the 40 kept are equals of 960 others: only the wide way knows which
    rows = sampling_rows(rules, [0] * 4, [0] * 4)
    blocks = sampler._blocks(jnp.asarray(logits))
    likelihood = jnp.exp(blocks - blocks.max((1, 2), keepdims=True))
    top_k = jnp.where(rows.top_k > 0, rows.top_k, blocks[0].size)
    _, suffices = sampler._draw_narrow(
        likelihood, blocks.max(-1), top_k, rows, jnp.zeros(4, jnp.float32)
    )
    assert suffices.tolist() == [True, True, True, False]


# Values and sums that float32 holds exactly, so that not even a margin of zero excuses anything.
@pytest.mark.parametrize(
    ("rule", "num_kept"),
    [
        (Rule(), 128),
        (Rule(top_k=127), 127),
        (Rule(top_k=128), 128),
        (Rule(top_k=129), 128),
        (Rule(top_k=2**31 - 1), 128),
        (Rule(top_k=1), 1),
        (Rule(top_k=65), 65),
        (Rule(top_p=0.5), 64),
        (Rule(top_p=0.75), 96),
        (Rule(top_p=1e-6), 1),
        (Rule(top_k=100, top_p=1e-300), 1),  # 0 in float32
        (Rule(top_p=0.999999), 128),
        (Rule(top_k=100, top_p=0.5), 50),  # renormalised: half of the 100, not 64
        (Rule(top_k=32, top_p=0.25, min_p=1.0), 8),
        (Rule(min_p=1.0), 128),
    ],
)
@pytest.mark.parametrize("temperature", [1e-6, 0.7, 1.0, 100.0])
def test_of_equals_the_lowest_ids_survive_and_exactly_as_many_as_asked(
    rule: Rule, num_kept: int, temperature: float
):
    """All logits equal: every one of the survivors comes up in 4,000 draws, and no other."""
    num_rows = 4000
    rules = [Rule(**(vars(rule) | {"temperature": temperature}))] * num_rows
    tokens = sample(np.full((num_rows, 128), 2.5, np.float32), rules, range(num_rows), [0] * 4000)
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
    ("rule", "share"),
    [
        (Rule(), 1.0),
        (Rule(top_p=0.5), 0.5),
        (Rule(top_p=0.75, min_p=1.0), 0.75),
        (Rule(min_p=1.0), 1.0),
        (Rule(temperature=0.3, top_p=0.25), 0.25),
        (Rule(top_k=8), None),
        (Rule(top_k=4), None),
        (Rule(top_k=4, top_p=0.5), None),
    ],
)
def test_borders_are_exact(num_equal: int, rule: Rule, share: float | None):
    """Equal tokens scattered among impossible ones: masses, targets and borders are exact.

    The token is the first whose cumulative mass exceeds the number; a border belongs to the token
    after it, a number of 0 to the first that has mass. Eight are drawn the narrow way, 512 not.
    """
    logits = np.full(1024, -np.inf, np.float32)
    equal = np.sort(np.random.default_rng(6).permutation(1023)[:num_equal] + 1)
    logits[equal] = 2.5
    num_kept = round(num_equal * share) if share else min(num_equal, rule.top_k)
    if rule.top_k and rule.top_p < 1:
        num_kept = 2
    seeds = list(_SEED_OF.values())
    assert [oracle.uniform(seed, 0) for seed in seeds] == list(_SEED_OF)
    tokens = sample(np.tile(logits, (5, 1)), [rule] * 5, seeds, [0] * 5)
    assert tokens.tolist() == [equal[int(chance * num_kept)] for chance in _SEED_OF]


def test_top_k_of_one_is_greedy():
    rng = np.random.default_rng(1)
    logits = np.stack([_random_logits(rng, 100) for _ in range(64)])
    drawn = sample(logits, [Rule(temperature=1.3, top_k=1)] * 64, range(64), range(64))
    greedy = sample(logits, [GREEDY] * 64, range(64), range(64))
    np.testing.assert_array_equal(drawn, greedy)
    np.testing.assert_array_equal(greedy, logits.argmax(-1))


def test_a_row_does_not_depend_on_its_batch():
    """Alone among padding of any content, in another place, beside any rules: the same token."""
    rng = np.random.default_rng(2)
    num_rows, vocab = 64, 1000
    logits = np.stack([_random_logits(rng, vocab) for _ in range(num_rows)])
    rules = [_random_rule(rng, vocab) for _ in range(num_rows)]
    seeds = rng.integers(0, 2**64, num_rows, np.uint64).tolist()
    together = sample(logits, rules, seeds, range(num_rows))
    order = rng.permutation(num_rows).tolist()
    moved = sample(logits[order], [rules[i] for i in order], [seeds[i] for i in order], order)
    np.testing.assert_array_equal(moved, together[order])
    for row in range(num_rows):
        for garbage in (np.nan, np.inf, -np.inf, 1e30):
            beside = np.full_like(logits, garbage)
            place = (row * 7) % num_rows
            beside[place] = logits[row]
            padded = [GREEDY] * num_rows
            padded[place] = rules[row]
            alone = sample(beside, padded, [seeds[row]] * num_rows, [row] * num_rows)
            assert alone[place] == together[row], (row, garbage, rules[row])


@pytest.mark.parametrize("vocab", [10, 100, 128])
@pytest.mark.parametrize("bad", ["one NaN", "all NaN", "inf", "all -inf"])
def test_a_broken_row_yields_an_id_and_disturbs_nobody(vocab: int, bad: str):
    rng = np.random.default_rng(3)
    num_rows = 64
    logits = np.stack([_random_logits(rng, vocab) for _ in range(num_rows)])
    rules = [_random_rule(rng, vocab) for _ in range(num_rows)]
    seeds = range(num_rows)
    healthy = sample(logits, rules, seeds, [0] * num_rows)
    broken = logits.copy()
    value = {"one NaN": np.nan, "all NaN": np.nan, "inf": np.inf, "all -inf": -np.inf}[bad]
    broken[::2, 3 if bad in ("one NaN", "inf") else slice(None)] = value
    tokens = sample(broken, rules, seeds, [0] * num_rows)
    np.testing.assert_array_equal(tokens[1::2], healthy[1::2])
    assert tokens.min() >= 0
    assert tokens.max() < vocab


# Distributions with many survivors and with few, so that both ways are tried.
_DISTRIBUTIONS = [
    Rule(temperature=0.7, top_p=0.95),
    Rule(temperature=3.0, top_k=90, top_p=0.98, min_p=0.001),
]
_MORE_DISTRIBUTIONS = [
    Rule(),
    Rule(top_k=20),
    Rule(temperature=0.4),
    Rule(temperature=2.0),
    Rule(top_k=80),
    Rule(top_p=0.5),
    Rule(top_p=0.99),
    Rule(min_p=0.2),
    Rule(min_p=0.01),
    Rule(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
]


@pytest.mark.parametrize(
    "rule",
    [
        *_DISTRIBUTIONS,
        *(pytest.param(rule, marks=pytest.mark.full) for rule in _MORE_DISTRIBUTIONS),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(rule: Rule):
    """Chi-square of 100,000 draws: over seeds at one position, and over positions of one seed."""
    vocab, num_rows, num_draws = 100, 5000, 100_000
    logits = np.random.default_rng(4).normal(0, 1, vocab).astype(np.float32)
    kept, value, *_ = oracle.survivors(logits, **vars(rule))
    expected = np.zeros(vocab)
    expected[kept] = value / value.sum() * num_draws
    batch, rules = np.tile(logits, (num_rows, 1)), [rule] * num_rows
    counts = np.zeros(vocab)
    for first in range(0, num_draws, num_rows):
        numbers = np.arange(first, first + num_rows)
        if first < num_draws // 2:
            tokens = sample(batch, rules, numbers.tolist(), np.zeros(num_rows, int).tolist())
        else:
            tokens = sample(batch, rules, [2**63 + 5] * num_rows, numbers.tolist())
        counts += np.bincount(tokens, minlength=vocab)
    assert not counts[expected == 0].any(), "a token that the rules exclude"
    # Cells with few expected draws are put together, as the test wants it.
    common = expected >= 10
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    p_value = jax.scipy.special.gammaincc((len(wanted) - 1) / 2, statistic / 2)
    assert p_value > 0.001


def test_the_random_numbers_are_threefry():
    """Known answers of the paper's authors for the oracle; the device agrees with the oracle."""
    ones = 0xFFFFFFFF
    assert oracle.threefry_2x32((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert oracle.threefry_2x32((ones, ones), (ones, ones)) == (0x1CB996FC, 0xBB002BE7)
    pi_key, pi_counter = (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)
    assert oracle.threefry_2x32(pi_key, pi_counter) == (0xC4923A9C, 0x483DF7A0)

    seeds = [0, 1, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1] * 3
    positions = [0] * 6 + [1] * 6 + [2**24 + 1] * 6
    rows = sampling_rows([Rule()] * len(seeds), seeds, positions)
    found = np.asarray(sampler.uniform(rows.seed, rows.position))
    expected = [oracle.uniform(*pair) for pair in zip(seeds, positions, strict=True)]
    assert found.tolist() == expected
    assert len(set(expected)) == len(expected), "seed and position both count, high word included"


def test_log_probabilities_are_those_of_the_raw_distribution():
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 10, (16, 100)).astype(np.float32)
    logits[0] += 1e4  # no overflow
    logits[1, ::2] = -np.inf
    tokens = rng.integers(0, 100, 16).astype(np.int32)
    tokens[1] = 1
    wide = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    found = np.asarray(sampler.chosen_logprobs(jnp.asarray(logits), jnp.asarray(tokens)))
    np.testing.assert_allclose(found, expected[np.arange(16), tokens], atol=2e-3, rtol=1e-5)

"""Draws follow the oracle's distribution under every rule and every pair of rules: chi-square.

Fixed seeds: a test that passes once passes always, until what is drawn changes. What would break
these: a rule left out or applied twice, two rules in another order, a border that is off by one, a
mass that is not renormalised, random numbers that are not uniform or not independent of each other
over seeds, positions or choices. `test_planted_faults_are_caught` shows that they would.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine import sampler
from octavo.engine.logit_rules import LogitRules, RuleTables
from octavo.engine.sampler import Samples
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.sampling_rows import SamplingRows

from . import sampling_oracle as oracle
from .chi_square import p_value
from .sampler_rows import RULES, Row, arrays

LEAST_P = 0.001
NUM_ROWS = 2000  # draws of one call
CLEAR, CLEAR_BORDER = 1e-6, 1e-5  # of a mass to its border, and of a scaled logit to the next
# Between the distribution of two rules and that of one of them: so far that a rule that is left out
# is seen in 100,000 draws.
LEAST_DISTANCE = 0.01

SHAPES = ["flat", "peaked", "zipf", "ties", "clusters", "wide"]
PAIRS = list(combinations(RULES, 2))
NESTED = [("top_k", "min_p"), ("top_p", "min_p")]
# In the default run: each rule in one pair at least, and alone at these shapes.
DEFAULT_SHAPES = ["flat", "zipf", "ties"]
DEFAULT_PAIRS = [
    ("top_k", "top_p"),
    ("presence_penalty", "allowed_token_ids"),
    ("temperature", "frequency_penalty"),
    ("top_p", "banned_token_ids"),
    ("min_p", "logit_bias"),
    ("repetition_penalty", "min_tokens"),
]


@cache
def shape(name: str, vocab: int) -> np.ndarray:
    """Logits, the most likely ids at random places."""
    rng = np.random.default_rng(SHAPES.index(name))
    normal = rng.normal(0, 1, vocab)
    logits = {
        "flat": np.zeros(vocab),
        "peaked": normal + 6 * (np.arange(vocab) == vocab // 3),
        "zipf": -np.log(rng.permutation(vocab) + 1.0),
        "ties": np.round(1.5 * normal),
        "clusters": np.where(rng.permutation(vocab) < 12, 5.0, 0.0) + 0.2 * normal,
        "wide": 10 * normal,
    }
    return logits[name].astype(np.float32)


def history(logits: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt and an output with likely ids, in one of them or in both, once and often."""
    likely = np.argsort(-logits, kind="stable").tolist()
    prompt = (*likely[0:9:2], *likely[20:60:2])
    output = (*likely[1:10:3] * 2, *likely[0:6:5], *likely[21:60:3])
    return prompt, output


def options(rule: str, logits: np.ndarray) -> dict[str, Any]:
    """A rule that changes what is likely."""
    likely = np.argsort(-logits, kind="stable").tolist()
    values: dict[str, Any] = {
        "temperature": 1.6,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.8,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.9,
        "logit_bias": ((likely[0], -1.5), (likely[3], 0.75), (likely[len(logits) // 2], 4.0)),
        "allowed_token_ids": tuple(token_id for token_id in range(len(logits)) if token_id % 3),
        "banned_token_ids": (likely[0], likely[2], likely[7], 11),
        "min_tokens": 1,
    }
    stops = {"stop_token_ids": tuple(likely[0:4])} if rule == "min_tokens" else {}
    return {rule: values[rule], **stops}


def row_of(rules: tuple[str, ...], logits: np.ndarray) -> Row:
    wanted: dict[str, Any] = {}
    for rule in rules:
        wanted |= options(rule, logits)
    prompt, output = history(logits)
    return Row(sampling=SamplingParams(**wanted), prompt=prompt, output=output)


def distribution(rules: tuple[str, ...], logits: np.ndarray) -> np.ndarray:
    row = row_of(rules, logits)
    return oracle.distribution(row.ruled(logits), row.sampling)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Total variation."""
    return float(np.abs(one - other).sum() / 2)


def matter(rules: tuple[str, ...], logits: np.ndarray, which: tuple[str, ...]) -> bool:
    """Whether a test would see that one of `which` is left out, and no border is a close one."""
    row = row_of(rules, logits)
    _, _, margin, border_gap = oracle.survivors(row.ruled(logits), row.sampling)
    expected = distribution(rules, logits)
    without = [tuple(rule for rule in rules if rule != left_out) for left_out in which]
    return (
        margin > CLEAR
        and not 0 < border_gap < CLEAR_BORDER
        and all(
            distance(expected, distribution(others, logits)) > LEAST_DISTANCE for others in without
        )
    )


def shapes_for(rules: tuple[str, ...], vocab: int) -> list[str]:
    """A shape at which all of the rules matter; if there is none, one for each of them.

    Of two prefixes only the shorter matters, so there is none where min_p follows another cut.
    """
    first = sum(map(RULES.index, rules))  # all shapes have their turn
    turned = [SHAPES[(first + place) % len(SHAPES)] for place in range(len(SHAPES))]

    def find(which: tuple[str, ...]) -> list[str]:
        return [name for name in turned if matter(rules, shape(name, vocab), which)][:1]

    found = find(rules)
    if not found:
        assert rules in NESTED, "a pair is not tested"
        found = [name for rule in rules for name in find((rule,))]
        assert len(found) == len(rules)
    return found


def compiled() -> Callable[..., Samples]:
    """The sampler for rows of equal logits, as it is now."""

    def draw(
        logits: jax.Array, rows: SamplingRows, rules: LogitRules, tables: RuleTables
    ) -> Samples:
        batch = jnp.broadcast_to(logits, (rows.position.shape[0], logits.shape[0]))
        return sampler.sample(batch, rows, rules, tables)

    return jax.jit(draw)


_draw = compiled()


def count_draws(
    logits: np.ndarray,
    row: Row,
    num_draws: int,
    num_rows: int,
    draw: Callable[..., Samples] = _draw,
) -> np.ndarray:
    """How often each id is drawn: in turn over seeds, over positions, and over choices too."""
    one, rules, tables = arrays([row], len(logits))

    def repeat(column: jax.Array) -> jax.Array:
        return jnp.repeat(column, num_rows, axis=0)

    rows, rules = jax.tree.map(repeat, one), jax.tree.map(repeat, rules)
    counts = np.zeros(len(logits), np.int64)
    same = np.zeros(num_rows, np.int32)
    for call in range(num_draws // num_rows):
        number = np.arange(num_rows, dtype=np.int32) + call * num_rows
        seed, position, choice = [
            (number, same, same),
            (same + 5, number, same),
            (same + 9, number // 100, number % 100),
        ][call % 3]
        words = np.stack([seed, same + 2**30], -1).astype(np.uint32)
        rows = replace(
            rows,
            seed=jnp.asarray(words),
            position=jnp.asarray(position),
            choice=jnp.asarray(choice),
        )
        samples = draw(jnp.asarray(logits), rows, rules, tables)
        assert not samples.is_broken.any()
        counts += np.bincount(np.asarray(samples.token), minlength=len(logits))
    return counts


def check_draws(
    rules: tuple[str, ...], name: str, *, vocab: int, num_draws: int, num_rows: int
) -> None:
    logits = shape(name, vocab)
    counts = count_draws(logits, row_of(rules, logits), num_draws, num_rows)
    assert counts.sum() == num_draws
    assert p_value(counts, distribution(rules, logits)) > LEAST_P, name


@pytest.mark.parametrize(
    ("rules", "vocab"),
    [
        pytest.param(
            rules,
            vocab,
            marks=[] if rules in DEFAULT_PAIRS and vocab == 257 else pytest.mark.full,
            id=f"{' and '.join(rules)}, {vocab}",
        )
        for rules in PAIRS
        for vocab in (257, 1000)
    ],
)
def test_every_pair_of_rules(rules: tuple[str, ...], vocab: int):
    """100,000 draws, at a shape at which both matter."""
    for name in shapes_for(rules, vocab):
        check_draws(rules, name, vocab=vocab, num_draws=100_000, num_rows=NUM_ROWS)


@pytest.mark.parametrize(
    "name",
    [
        name if name in DEFAULT_SHAPES else pytest.param(name, marks=pytest.mark.full)
        for name in SHAPES
    ],
)
@pytest.mark.parametrize("rule", ["", *RULES])
def test_every_rule_alone_at_every_shape(rule: str, name: str):
    """10,000 draws at a small vocabulary, whether the rule changes anything there or not."""
    rules = (rule,) if rule else ()
    check_draws(rules, name, vocab=257, num_draws=10_000, num_rows=NUM_ROWS)


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_at_a_large_vocabulary(rule: str):
    """10,000 draws at each shape of two, at the size of a real model."""
    large = 49_152
    logits_of = [name for name in SHAPES if matter((rule,), shape(name, large), (rule,))]
    assert len(logits_of) >= 2
    for name in logits_of[-2:]:
        check_draws((rule,), name, vocab=large, num_draws=10_000, num_rows=250)


def _prefix(probability: np.ndarray, is_kept: np.ndarray) -> np.ndarray:
    kept = np.where(is_kept | (probability == probability.max()), probability, 0.0)
    return kept / kept.sum()


def _faults() -> dict[str, tuple[tuple[str, ...], Callable[[np.ndarray], np.ndarray]]]:
    """Distributions that a sampler with one fault would draw from, and under which rules."""

    def changed(rules: tuple[str, ...], **fields: Any) -> Callable[[np.ndarray], np.ndarray]:
        """The rules with other values."""

        def fault(logits: np.ndarray) -> np.ndarray:
            row = row_of(rules, logits)
            row = replace(row, sampling=replace(row.sampling, **fields))
            return oracle.distribution(row.ruled(logits), row.sampling)

        return fault

    def not_renormalised(logits: np.ndarray) -> np.ndarray:
        top_k, top_p = (distribution((rule,), logits) for rule in ("top_k", "top_p"))
        return _prefix(distribution((), logits), (top_k > 0) & (top_p > 0))

    def relative_to_the_whole(logits: np.ndarray) -> np.ndarray:
        probability = distribution((), logits)
        return _prefix(probability, probability >= 0.1)

    def maximum_before_the_rules(logits: np.ndarray) -> np.ndarray:
        ruled = row_of(("banned_token_ids",), logits).ruled(logits)
        likelihood = np.exp(ruled - logits.max())
        return _prefix(likelihood, likelihood >= 0.1)

    def history_of(rule: str, *, prompt: str, output: str) -> Callable[[np.ndarray], np.ndarray]:
        """The penalty takes other parts of the history for prompt and output."""

        def fault(logits: np.ndarray) -> np.ndarray:
            row = row_of((rule,), logits)
            part = {"nothing": (), "prompt": row.prompt, "output": row.output}
            part["both"] = row.prompt + row.output
            row = replace(row, prompt=part[prompt], output=part[output])
            return oracle.distribution(row.ruled(logits), row.sampling)

        return fault

    def divides_negative_logits(logits: np.ndarray) -> np.ndarray:
        row = row_of(("repetition_penalty",), logits)
        seen = [*{*row.prompt, *row.output}]
        ruled = logits.astype(np.float64)
        ruled[seen] /= row.sampling.repetition_penalty
        return oracle.distribution(ruled, row.sampling)

    def after_temperature(rule: str) -> Callable[[np.ndarray], np.ndarray]:
        def fault(logits: np.ndarray) -> np.ndarray:
            row = row_of(("temperature", rule), logits)
            ruled = row.ruled(logits / np.float32(row.sampling.temperature))
            return oracle.distribution(ruled, replace(row.sampling, temperature=1.0))

        return fault

    return {
        "top_k keeps one more": (("top_k",), changed(("top_k",), top_k=21)),
        "top_k keeps one less": (("top_k",), changed(("top_k",), top_k=19)),
        "top_p a little high": (("top_p",), changed(("top_p",), top_p=0.82)),
        "top_p is not renormalised after top_k": (("top_k", "top_p"), not_renormalised),
        "min_p is relative to the whole": (("min_p",), relative_to_the_whole),
        "min_p is relative to the maximum before bans": (
            ("min_p", "banned_token_ids"),
            maximum_before_the_rules,
        ),
        "temperature is squared": (("temperature",), changed(("temperature",), temperature=2.56)),
        "temperature a hundredth high": (
            ("temperature",),
            changed(("temperature",), temperature=1.65),
        ),
        "repetition of the output only": (
            ("repetition_penalty",),
            history_of("repetition_penalty", prompt="nothing", output="output"),
        ),
        "repetition of the prompt only": (
            ("repetition_penalty",),
            history_of("repetition_penalty", prompt="prompt", output="nothing"),
        ),
        "repetition divides negative logits": (("repetition_penalty",), divides_negative_logits),
        "frequency of the prompt too": (
            ("frequency_penalty",),
            history_of("frequency_penalty", prompt="prompt", output="both"),
        ),
        "presence of the prompt too": (
            ("presence_penalty",),
            history_of("presence_penalty", prompt="prompt", output="both"),
        ),
        "frequency after temperature": (
            ("temperature", "frequency_penalty"),
            after_temperature("frequency_penalty"),
        ),
        "bias after temperature": (
            ("temperature", "logit_bias"),
            after_temperature("logit_bias"),
        ),
    }


@pytest.mark.parametrize("vocab", [257, 1000])
@pytest.mark.parametrize("fault", _faults())
def test_planted_faults_are_caught(fault: str, vocab: int):
    """100,000 draws of a sampler with a fault do not pass for draws of a right one, at some shape.

    At others the two distributions may be one and the same.
    """
    rules, faulty = _faults()[fault]
    rng = np.random.default_rng(vocab)
    p_values: list[float] = []
    for name in SHAPES:
        logits = shape(name, vocab)
        counts = rng.multinomial(100_000, faulty(logits))
        p_values.append(p_value(counts, distribution(rules, logits)))
    assert min(p_values) < LEAST_P


def test_right_draws_are_not_caught():
    """The test's own false alarms: about one in a thousand, over distributions of all kinds."""
    rng = np.random.default_rng(1)
    num_trials = num_alarms = 0
    for name in SHAPES:
        for rules in ((), *((rule,) for rule in RULES)):
            probability = distribution(rules, shape(name, 1000))
            for _ in range(20):
                counts = rng.multinomial(10_000, probability)
                num_trials += 1
                num_alarms += p_value(counts, probability) < 0.01
    assert 0.005 < num_alarms / num_trials < 0.02


def test_a_fault_in_the_sampler_itself_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The whole way from logits to the p-value, with a sampler that keeps one token too many."""
    for_vocabulary = SamplingRows.for_vocabulary

    def one_more(rows: SamplingRows, size: int) -> SamplingRows:
        return for_vocabulary(replace(rows, top_k=rows.top_k + 1), size)

    monkeypatch.setattr(SamplingRows, "for_vocabulary", one_more)
    logits = shape("clusters", 257)
    row = row_of(("top_k",), logits)
    counts = count_draws(logits, row, 20_000, NUM_ROWS, compiled())
    assert p_value(counts, distribution(("top_k",), logits)) < LEAST_P

"""Which ids top-k, top-p and min-p leave: exactly the oracle's, through every way of the sampler.

What would break these: one id more or less at a border, ties that go to a higher id, a mass that is
not that of what top-k left, a row that nothing is left of.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
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
from octavo.engine.truncation import truncate
from octavo.engine.vocabulary_blocks import in_blocks

from . import sampling_oracle as oracle
from .random_rows import random_logits, random_truncation
from .sampler_rows import PADDING, Row, arrays

CLEAR = 1e-6  # a mass so close to top_p may fall to either side of it
MOST_ROWS = 128


@jax.jit
def _kept(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """What the wide way keeps: the function behind every row that is truncated so."""
    blocks = in_blocks(logits)
    likelihood = sampler._likelihood(blocks, blocks.max(-1), rows.temperature)
    kept = truncate(blocks, likelihood, rows.for_vocabulary(logits.shape[1]))
    return kept.reshape(len(logits), -1) > 0


def survivors(logits: np.ndarray, wanted: list[SamplingParams]) -> list[list[int]]:
    """The ids that the wide way keeps of each row; nothing past the vocabulary ever is.

    Rows are filled up to one number, so that few shapes are compiled.
    """
    num_rows, vocab = logits.shape
    padding = MOST_ROWS - num_rows
    padded = [Row(sampling=sampling) for sampling in wanted] + [PADDING] * padding
    kept = _kept(jnp.asarray(np.pad(logits, ((0, padding), (0, 0)))), arrays(padded, vocab)[0])
    kept = np.asarray(kept)[:num_rows]
    assert not kept[:, vocab:].any()
    return [np.flatnonzero(row).tolist() for row in kept]


def sizes(vocab: int) -> list[int]:
    return [-1, 0, 1, 2, 5, 63, 64, 65, vocab - 1, vocab, vocab + 1, vocab + 600, 2**31 - 1]


@pytest.mark.parametrize("vocab", [10, 64, 257, 1000])
def test_top_k_leaves_exactly_k_and_the_lowest_of_equals(vocab: int):
    """-1 and 0 and everything from the vocabulary's size on leave all."""
    rng = np.random.default_rng(vocab)
    normal = rng.normal(0, 1, vocab)
    shapes = [
        np.zeros(vocab),
        normal,
        np.round(normal),
        np.round(4 * normal) / 4,
        np.where(np.arange(vocab) % 3 == 1, 1.0, 0.5),
        np.where(np.arange(vocab) == vocab - 1, 2.0, 0.0),
        np.sort(normal),
        np.sort(normal)[::-1],
    ]
    cases = list(product(shapes, sizes(vocab)))
    logits = np.stack([shape for shape, _ in cases]).astype(np.float32)
    found = survivors(logits, [SamplingParams(top_k=size) for _, size in cases])
    for row, kept, (_, size) in zip(logits, found, cases, strict=True):
        count = vocab if size < 1 else min(size, vocab)
        order = np.lexsort((np.arange(vocab), -row))
        assert kept == sorted(order[:count].tolist()), (size, row)


@pytest.mark.parametrize("vocab", [10, 257, 1000])
def test_truncations_leave_what_the_oracle_leaves(vocab: int):
    """Any mix, over random and adversarial logits; never nothing, and the most likely always."""
    rng = np.random.default_rng(vocab)
    num_rows = num_clear = 0
    for _ in range(12):
        logits = np.stack([random_logits(rng, vocab) for _ in range(64)])
        wanted = [
            SamplingParams(**random_truncation(rng, vocab) | {"temperature": temperature})
            for temperature in rng.choice([0.3, 1.0, 1.5, 20.0], 64).tolist()
        ]
        for row, sampling, kept in zip(logits, wanted, survivors(logits, wanted), strict=True):
            assert kept, (sampling, row)
            assert row[kept].max() == row.max(), (sampling, row)
            expected, _, margin, _ = oracle.survivors(row, sampling)
            num_rows += 1
            num_clear += margin > CLEAR
            if margin > CLEAR:
                # Whether the least numbers of float32 are 0 is the device's affair.
                is_likely = (row - row.max()) / sampling.temperature > -70
                assert {*kept} - {*expected} == set(), (sampling, row)
                assert not is_likely[[*{*expected} - {*kept}]].any(), (sampling, row)
    assert num_clear > 0.9 * num_rows


@pytest.mark.parametrize("share", [1e-6, 0.1, 0.25, 0.5, 0.9, 0.99])
def test_top_p_stops_at_the_mass_and_no_earlier(share: float):
    """Masses that lie 2e-6 of the whole on either side of top_p decide; closer ones may not."""
    logits = np.log(np.linspace(1, 4, 257)).astype(np.float32)
    tokens, value, *_ = oracle.survivors(logits, SamplingParams(top_p=share))
    everything = np.exp(logits.astype(np.float64) - logits.max())
    mass, whole = value.sum(), everything.sum()
    before = (mass - value[-1]) / whole
    just_before, just_after = mass / whole - 2e-6, mass / whole + 2e-6
    wanted = [SamplingParams(top_p=each) for each in (before + 2e-6, just_before, just_after)]
    found = survivors(np.tile(logits, (3, 1)), wanted)
    assert [len(kept) for kept in found] == [len(tokens), len(tokens), len(tokens) + 1]


@pytest.mark.parametrize("top_p", [1e-45, 1e-38, 1e-12])
@pytest.mark.parametrize("min_p", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 7])
def test_the_most_likely_stays(top_p: float, min_p: float, top_k: int):
    sampling = SamplingParams(top_p=top_p, min_p=min_p, top_k=top_k)
    logits = np.full((3, 257), -2.0, np.float32)
    logits[0, 200] = 1.0
    logits[1, [30, 256]] = 1.0
    assert survivors(logits, [sampling] * 3) == [[200], [30], [0]]


_NUM_CHANCES = 1024


@pytest.fixture(scope="module")
def sample_in_order() -> Iterator[Callable[..., Samples]]:
    """The sampler, compiled with numbers that cover [0, 1) in place of random ones."""

    def chances_in_order(seed: jax.Array, position: jax.Array, choice: jax.Array) -> jax.Array:
        return (position.astype(jnp.float32) + 0.5) / _NUM_CHANCES

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "uniform", chances_in_order)

        def sample_anew(
            logits: jax.Array, rows: SamplingRows, rules: LogitRules, tables: RuleTables
        ) -> Samples:
            return sampler.sample(logits, rows, rules, tables)

        yield jax.jit(sample_anew)


@pytest.mark.parametrize("vocab", [pytest.param(257, marks=pytest.mark.full), 1000])
@pytest.mark.parametrize(
    "truncation",
    [
        {},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 64},
        {"top_k": 65},
        {"top_k": 150},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.3},
        {"min_p": 0.01},
        {"top_k": 100, "top_p": 0.7},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.2},
        {"temperature": 3.0, "top_p": 0.9, "min_p": 0.3},
    ],
    ids=str,
)
def test_each_survivor_gets_its_share_of_the_unit_interval(
    vocab: int, truncation: dict[str, Any], sample_in_order: Callable[..., Samples]
):
    """All numbers in turn: every survivor comes, in order of ids, as often as it is likely.

    With rules a row goes the wide way, without them the narrow one if that suffices; among equals,
    and among few and many.
    """
    rng = np.random.default_rng(vocab)
    position = jnp.arange(_NUM_CHANCES, dtype=jnp.int32)
    chances = (np.arange(_NUM_CHANCES) + 0.5) / _NUM_CHANCES
    for logits in (rng.normal(0, 2, vocab), np.round(rng.normal(0, 1.5, vocab))):
        logits = logits.astype(np.float32)
        for logit_bias in ((), ((0, 0.0),)):
            sampling = SamplingParams(**truncation, logit_bias=logit_bias)
            rows, its_rules, tables = arrays([Row(sampling=sampling)] * _NUM_CHANCES, vocab)
            rows = replace(rows, position=position)
            batch = jnp.broadcast_to(jnp.asarray(logits), (_NUM_CHANCES, vocab))
            tokens = np.asarray(sample_in_order(batch, rows, its_rules, tables).token)
            probability = oracle.distribution(logits, sampling)
            ends = np.cumsum(probability)
            # A number that lies on a border may go either way.
            low = np.searchsorted(ends, chances - CLEAR, side="right")
            high = np.searchsorted(ends, chances + CLEAR, side="right")
            assert (probability[tokens] > 0).all()
            assert ((tokens == low) | (tokens == high)).all()

"""Log-probabilities on the device: the model's distribution, ties, and what has none.

What would break these: a sum that overflows, ties that go by block, padding that is reported, an
infinity that reaches the wire, and logits that mean nothing passing for some that do.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.logprobs import chosen_logprobs, top_logprobs
from octavo.engine.sampling_params import LEAST_LOGPROB

from .random_rows import random_logits

_chosen = jax.jit(chosen_logprobs)
_top = jax.jit(top_logprobs, static_argnums=1)


def test_log_probabilities_are_those_of_the_raw_distribution():
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 10, (16, 100)).astype(np.float32)
    logits[0] += 1e4  # no overflow
    logits[1, ::2] = -np.inf
    tokens = rng.integers(0, 100, 16).astype(np.int32)
    tokens[1] = 1
    wide = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    found = np.asarray(_chosen(jnp.asarray(logits), jnp.asarray(tokens)))
    np.testing.assert_allclose(found, expected[np.arange(16), tokens], atol=2e-3, rtol=1e-5)
    ids, top = map(np.asarray, _top(jnp.asarray(logits), 20))
    for row in range(16):
        order = np.lexsort((np.arange(100), -logits[row]))[:20]
        assert ids[row].tolist() == order.tolist()
        np.testing.assert_allclose(top[row], expected[row, order], atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("vocab", [10, 100, 257, 3000])
def test_the_most_likely_ids_are_the_lowest_of_equals(vocab: int):
    """Fails if ties go to whichever block is higher, or padding of the last block is reported."""
    rng = np.random.default_rng(vocab)
    logits = np.stack([random_logits(rng, vocab) for _ in range(200)])
    logits[0] = -np.inf
    logits[0, vocab - 1] = 0.0
    ids, logprobs = map(np.asarray, _top(jnp.asarray(logits), 20))
    count = min(vocab, 20)
    for row in range(len(logits)):
        order = np.lexsort((np.arange(vocab), -logits[row]))[:count]
        assert ids[row, :count].tolist() == order.tolist(), logits[row]
    assert (np.diff(logprobs) <= 0).all()
    assert not ids[:, count:].any()
    assert (logprobs[:, count:] == LEAST_LOGPROB).all()


def test_log_probabilities_are_finite_where_ids_are_impossible():
    """Failure case 3.5: a model that rules ids out, 20 most likely of 2, a difference of 1e30."""
    logits = np.full((4, 100), -np.inf, np.float32)
    logits[:, [4, 70]] = 1.0
    logits[1] = 0.0
    logits[1, 5] = 1e30
    logits[2, :] = -1e30
    logits[2, 9] = 0.0
    logits[3, :] = -200.0
    logits[3, 8] = 9900.0
    for token in (0, 4, 5, 99):
        found = _chosen(jnp.asarray(logits), jnp.full(4, token, jnp.int32))
        assert np.isfinite(found).all()
        assert (np.asarray(found) <= 0).all()
    assert _chosen(jnp.asarray(logits), jnp.zeros(4, jnp.int32)).tolist() == [-9999.0] * 4
    ids, logprobs = map(np.asarray, _top(jnp.asarray(logits), 20))
    assert np.isfinite(logprobs).all()
    assert ids[0, :2].tolist() == [4, 70]
    np.testing.assert_allclose(logprobs[0, :2], -np.log(2), rtol=1e-6)
    assert (logprobs[0, 2:] == -9999.0).all()
    assert (logprobs[1:3, 1:] == -9999.0).all()
    assert (logprobs[1:, 0] == 0.0).all()


@pytest.mark.parametrize("num_rows", [4, 32])
def test_logits_that_mean_nothing_have_no_log_probability(num_rows: int):
    """NaN or infinity anywhere, or nothing but -inf: NaN, whichever token; never in another row.

    XLA's CPU code forgets a NaN in the maximum of eight rows and more.
    """
    logits = np.random.default_rng(0).normal(0, 3, (num_rows, 100)).astype(np.float32)
    logits[0, 7] = np.nan
    logits[1, 7] = np.inf
    logits[2] = -np.inf
    for token in (7, 8):
        found = _chosen(jnp.asarray(logits), jnp.full(num_rows, token, jnp.int32))
        assert np.isnan(found).tolist() == [True] * 3 + [False] * (num_rows - 3)

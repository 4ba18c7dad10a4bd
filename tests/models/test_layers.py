"""Each small part against NumPy in float64, with formulas written another way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.configs.model_config import ModelConfig, RopeScaling
from octavo.models.layers import (
    apply_rope,
    gated_silu,
    linear,
    rms_norm,
    rope_frequencies,
    rope_table,
)

from . import numpy_decoder
from .tiny_checkpoints import tiny_config

LLAMA_3_1 = tiny_config(
    head_dim=128,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    ),
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("outputs", [(7,), (2, 5), (3, 4, 6)])
def test_linear_is_the_product_with_each_output(rng: np.random.Generator, outputs: tuple[int, ...]):
    x, weight = normal(rng, 4, 32), normal(rng, *outputs, 32)
    product = linear(jnp.asarray(x), jnp.asarray(weight))
    assert product.shape == (4, *outputs)
    expected = np.einsum("ti,...i->t...", x.astype(np.float64), weight)
    np.testing.assert_allclose(product, expected, atol=1e-5)


def test_linear_rounds_operands_to_the_weights_dtype_and_sums_in_float32(rng: np.random.Generator):
    x, weight = normal(rng, 4, 512), jnp.asarray(normal(rng, 9, 512), jnp.bfloat16)
    product = linear(jnp.asarray(x), weight)
    assert product.dtype == jnp.float32
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    expected = rounded @ np.asarray(weight, np.float64).T
    # A sum kept in bfloat16 would be off by more than 0.1.
    np.testing.assert_allclose(product, expected, atol=1e-3)


def test_rms_norm(rng: np.random.Generator):
    x, weight = normal(rng, 3, 64) * 10, normal(rng, 64)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.5) * weight
    found = rms_norm(jnp.asarray(x), jnp.asarray(weight), 0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_rms_norm_of_zeros_is_zero():
    assert not rms_norm(jnp.zeros((2, 8)), jnp.ones(8), 1e-5).any()


@pytest.mark.parametrize("config", [tiny_config(head_dim=64), LLAMA_3_1], ids=["plain", "llama3"])
def test_rope_frequencies(config: ModelConfig):
    expected = numpy_decoder.rope_frequencies(config)
    np.testing.assert_allclose(rope_frequencies(config), expected, rtol=2e-6)


def test_llama3_scaling_leaves_short_waves_alone_and_slows_long_ones():
    """Values of the three ranges, so that the formula is not only held to another formula."""
    plain = numpy_decoder.rope_frequencies(tiny_config(head_dim=128, rope_theta=500_000.0))
    ratio = np.asarray(rope_frequencies(LLAMA_3_1)) / plain
    wavelengths = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wavelengths < 8192 / 4], 1.0, rtol=1e-5)
    np.testing.assert_allclose(ratio[wavelengths > 8192], 1 / 8, rtol=1e-5)
    between = ratio[(wavelengths > 8192 / 4) & (wavelengths < 8192)]
    assert len(between) > 2
    assert (np.diff(between) < 0).all()
    assert between.max() < 1
    assert between.min() > 1 / 8


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
def test_rope_turns_pairs_by_position(rng: np.random.Generator, heads: tuple[int, ...]):
    config = tiny_config(head_dim=16)
    x = normal(rng, 5, *heads, 16)
    positions = np.array([0, 1, 7, 100, 255], np.int32)
    found = apply_rope(jnp.asarray(x), rope_table(jnp.asarray(positions), config))
    np.testing.assert_allclose(found, numpy_decoder.rotate(x, positions, config), atol=1e-4)
    np.testing.assert_array_equal(found[0], x[0])


def test_rope_makes_scores_depend_on_distance_alone(rng: np.random.Generator):
    config = tiny_config(head_dim=16)
    q, k = (jnp.asarray(np.tile(normal(rng, 16), (4, 1))) for _ in range(2))
    start = jnp.array([0, 3, 50, 200], jnp.int32)
    turned_q = apply_rope(q, rope_table(start + 11, config))
    turned_k = apply_rope(k, rope_table(start, config))
    scores = np.asarray((turned_q * turned_k).sum(-1))
    np.testing.assert_allclose(scores, scores[0], atol=1e-4)


def test_gated_silu(rng: np.random.Generator):
    gate_up = normal(rng, 3, 2, 8) * 5
    gate, up = gate_up[:, 0].astype(np.float64), gate_up[:, 1]
    found = jax.jit(gated_silu)(gate_up)
    np.testing.assert_allclose(found, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)

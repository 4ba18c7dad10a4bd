"""The small parts of a decoder: linear, RMSNorm, rotary embedding. Pure functions over arrays.

Residual stream and sums are float32; matmul operands are cast to the weights' dtype at the door.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ..configs.model_config import ModelConfig


def linear(
    x: Float[Array, "tokens inputs"], weight: Float[Array, "... inputs"]
) -> Float[Array, "tokens ..."]:
    """Returns x times the transpose of an output-major weight, in float32.

    Every matrix product of the model goes through here. Output-major is how checkpoints store
    weights and what the CPU multiplies fastest; a weight with several output dimensions multiplies
    as a matrix, since XLA's CPU product of more than two takes two to three times as long.
    """
    *outputs, inputs = weight.shape
    product = lax.dot_general(
        x.astype(weight.dtype),
        weight.reshape(-1, inputs),
        (((1,), (1,)), ((), ())),
        # Without it a TPU multiplies float32 operands as bfloat16.
        precision=lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return product.reshape(x.shape[0], *outputs)


def rms_norm(
    x: Float[Array, "*batch hidden"], weight: Float[Array, " hidden"], epsilon: float
) -> Float[Array, "*batch hidden"]:
    """X over its root mean square, times weight. Source: https://arxiv.org/abs/1910.07467."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def rope_frequencies(config: ModelConfig) -> Float[Array, " half_head_dim"]:
    """Radians a token of each rotated pair of head dimensions.

    Source: https://arxiv.org/abs/2104.09864, with Llama 3's stretch of the low frequencies where
    config.rope_scaling asks for it (Hugging Face transformers, `rope_type: llama3`).
    """
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * jnp.pi / frequencies
    # 0 where the wavelength is long (stretched in full), 1 where it is short (left alone).
    kept = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    kept = jnp.clip(kept, 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_table(
    positions: Int32[Array, " tokens"], config: ModelConfig
) -> tuple[Float[Array, "tokens half_head_dim"], Float[Array, "tokens half_head_dim"]]:
    """Cosine and sine of each token's rotation; the same for all layers of a step."""
    angles = positions.astype(jnp.float32)[:, None] * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "tokens *heads head_dim"],
    table: tuple[Float[Array, "tokens half_head_dim"], Float[Array, "tokens half_head_dim"]],
) -> Float[Array, "tokens *heads head_dim"]:
    """Rotates pairs (i, i + head_dim / 2) of each head: Hugging Face's half-split convention."""
    heads = (1,) * (x.ndim - 2)
    cos, sin = (part.reshape(part.shape[0], *heads, part.shape[1]) for part in table)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def gated_silu(gate_up: Float[Array, "tokens two ffn"]) -> Float[Array, "tokens ffn"]:
    """SwiGLU's activation: silu(gate) * up. Source: https://arxiv.org/abs/2002.05202."""
    return jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]

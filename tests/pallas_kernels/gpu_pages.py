"""Pages of the GPU backend to and from keys and values, in NumPy."""

import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.backend import KVLayer
from octavo.pallas_kernels.gpu_budget import padded_head_dim


def pack(k_pages: np.ndarray, v_pages: np.ndarray) -> KVLayer:
    """Keys and values [pages, page_size, kv_heads, head_dim] as one layer."""
    *places, kv_heads, head_dim = k_pages.shape
    sides = np.stack([k_pages, v_pages], axis=3).reshape(*places, 2 * kv_heads, head_dim)
    padding = padded_head_dim(head_dim) - head_dim
    # Padding is zero where a token was written, and like the rest of its place where none was.
    filler = np.where(np.isnan(sides[..., :1]), sides[..., :1], np.zeros((), sides.dtype))
    return jnp.asarray(np.concatenate([sides, np.repeat(filler, padding, axis=-1)], axis=-1))


def unpack(layer: KVLayer, kv_heads: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of pack."""
    sides = np.asarray(layer)[..., :head_dim]
    return sides[..., 0::2, :].copy(), sides[..., 1::2, :].copy()

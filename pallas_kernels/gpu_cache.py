"""KV pages of the GPU backend: layout, allocation, writes.

A layer is one array [pages, page_size, 2 * kv_heads, width]: a token is contiguous, and so are key
and value of a head, so that one copy brings a head's share of a page. Heads of 64, 128 or 256 are
stored as they are, others padded with zeros to the next width.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .backend import KVShape
from .gpu_budget import padded_head_dim


def allocate(shape: KVShape, num_pages: int) -> Float[Array, "pages page_size kv_sides width"]:
    """Zeroed pages of one layer."""
    width = padded_head_dim(shape.head_dim)
    return jnp.zeros((num_pages, shape.page_size, 2 * shape.kv_heads, width), shape.dtype)


def bytes_per_page(shape: KVShape) -> int:
    """Bytes of one page of one layer, padding included."""
    sides = 2 * shape.kv_heads * padded_head_dim(shape.head_dim)
    return shape.page_size * sides * jnp.dtype(shape.dtype).itemsize


def pad_heads(
    x: Float[Array, "tokens heads head_dim"], width: int
) -> Float[Array, "tokens heads width"]:
    """Pads heads with zeros: they add nothing to a score, and give a part that is cut off."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1])))


def write_kv(
    pages: Float[Array, "pages page_size kv_sides width"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
) -> Float[Array, "pages page_size kv_sides width"]:
    """Stores each token's key and value; in place where the pages are donated.

    The places must be unique, padding included: else XLA writes with atomics, one half word a time.
    """
    num_pages, page_size, sides, width = pages.shape
    new = jnp.stack([pad_heads(k, width), pad_heads(v, width)], axis=2)
    new = new.reshape(-1, sides, width).astype(pages.dtype)
    tokens = pages.reshape(num_pages * page_size, sides, width)
    tokens = tokens.at[slot_mapping].set(new, mode="drop", unique_indices=True)
    return tokens.reshape(pages.shape)

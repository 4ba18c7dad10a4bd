"""KV pages of the reference backend: layout, allocation, writes.

Keys and values lie in separate arrays [pages, page_size, kv_heads * head_dim]: on the CPU one
combined array makes a decode step a quarter to two fifths slower (BUILD_NOTES.md, section 4).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .backend import KVShape


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReferencePages:
    """The pages of one layer.

    Attributes:
      k: Keys of all kv heads of a token side by side.
      v: Values, likewise.
    """

    k: Float[Array, "pages page_size kv_width"]
    v: Float[Array, "pages page_size kv_width"]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[1]


def allocate(shape: KVShape, num_pages: int) -> ReferencePages:
    """Zeroed pages of one layer."""
    pages = (num_pages, shape.page_size, shape.kv_heads * shape.head_dim)
    return ReferencePages(jnp.zeros(pages, shape.dtype), jnp.zeros(pages, shape.dtype))


def bytes_per_page(shape: KVShape) -> int:
    """Bytes that one page of one layer takes."""
    elements = 2 * shape.page_size * shape.kv_heads * shape.head_dim
    return elements * jnp.dtype(shape.dtype).itemsize


def write_kv(
    kv_layer: ReferencePages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
) -> ReferencePages:
    """Stores each token's key and value at its place; a place past the pool is dropped.

    Donates kv_layer. The places must be unique, padding included: that lets XLA scatter without
    atomics on a GPU. Never -1, which JAX wraps to the last place before it looks at the mode.
    """

    def write(pages: jax.Array, new: jax.Array) -> jax.Array:
        num_pages, page_size, width = pages.shape
        tokens = pages.reshape(num_pages * page_size, width)
        rows = new.reshape(-1, width).astype(pages.dtype)
        tokens = tokens.at[slot_mapping].set(rows, mode="drop", unique_indices=True)
        return tokens.reshape(pages.shape)

    return ReferencePages(write(kv_layer.k, k), write(kv_layer.v, v))

"""KV pages of the reference backend: layout, allocation, writes.

Keys and values lie in separate arrays [pages, page_size, kv_heads * head_dim]: on the CPU one
combined array makes a decode step a quarter to two fifths slower (BUILD_NOTES.md, section 4).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVLayer:
    """The pages of one layer. Page is the leading axis, so copying and moving need no more.

    Attributes:
      k: Keys of all kv heads of a token side by side.
      v: Values, likewise.
    """

    k: Float[Array, "pages page_size kv_width"]
    v: Float[Array, "pages page_size kv_width"]

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[1]


def allocate(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: str
) -> list[KVLayer]:
    """Zeroed pages for every layer. Page 0 is never written and stays zero."""
    shape = (num_pages, page_size, num_kv_heads * head_dim)
    return [KVLayer(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers)]


def bytes_per_page(
    num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: str
) -> int:
    """Bytes that one page takes over all layers."""
    return 2 * num_layers * page_size * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize


def write_kv(
    kv_layer: KVLayer,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
) -> KVLayer:
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

    return KVLayer(write(kv_layer.k, k), write(kv_layer.v, v))

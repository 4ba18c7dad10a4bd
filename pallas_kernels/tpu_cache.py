"""KV pages on TPU: layout, allocation, and the kernel that stores new tokens in place.

Layout `[pages, page_size, words, 2, lanes]` in bfloat16. The last two axes are one tile of 32-bit
words, 128 lanes wide: XLA's own layout of this shape is the one that kernels need, so nothing is
ever copied or padded, and a token and a page are contiguous, one DMA each.

- Heads wider than 64: a word holds a key (low half) and a value (high half) of one head; lanes are
  head_dim rounded up to 128.
- Heads up to 64: a word holds two heads, the even one in the low half; keys lie in lanes [0, 64),
  values in [64, 128). An odd last head leaves its word half empty.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Int32

from .backend import KVShape

LANES = 128
NARROW = 64  # the widest head of which key and value fit side by side into the lanes


@dataclass(frozen=True)
class HeadLayout:
    """How the heads of one token lie in its words.

    Attributes:
      kv_heads: Key and value heads of one device.
      head_dim: Width of one head.
    """

    kv_heads: int
    head_dim: int

    @property
    def is_narrow(self) -> bool:
        """Two heads share a word, key and value share the lanes."""
        return self.head_dim <= NARROW

    @property
    def words(self) -> int:
        """32-bit words of a token, each as wide as the lanes."""
        return -(-self.kv_heads // 2) if self.is_narrow else self.kv_heads

    @property
    def lanes(self) -> int:
        """Lanes of a word."""
        return LANES if self.is_narrow else -(-self.head_dim // LANES) * LANES

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, padding included."""
        return self.words * self.lanes * 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TpuPages:
    """The pages of one layer on one device.

    Attributes:
      pages: Keys and values, laid out as the module says.
      kv_heads: Of this device; with two heads to a word the shape cannot tell whether it is odd.
    """

    pages: BFloat16[Array, "pages page_size words 2 lanes"]
    kv_heads: int = field(metadata={"static": True})

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.pages.shape[1]


def allocate(shape: KVShape, num_pages: int) -> TpuPages:
    """Zeroed pages of one layer."""
    heads = HeadLayout(shape.kv_heads, shape.head_dim)
    dimensions = (num_pages, shape.page_size, heads.words, 2, heads.lanes)
    return TpuPages(jnp.zeros(dimensions, jnp.bfloat16), shape.kv_heads)


def bytes_per_page(shape: KVShape) -> int:
    """Bytes that one page of one layer takes, padding included."""
    return shape.page_size * HeadLayout(shape.kv_heads, shape.head_dim).token_bytes


def pack_tokens(
    k: Float[Array, "tokens kv_heads head_dim"], v: Float[Array, "tokens kv_heads head_dim"]
) -> BFloat16[Array, "tokens words 2 lanes"]:
    """Keys and values as they lie in the pages."""
    tokens, kv_heads, head_dim = k.shape
    heads = HeadLayout(kv_heads, head_dim)
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    if heads.is_narrow:
        both = jnp.concatenate([_pad_last(k, NARROW), _pad_last(v, NARROW)], axis=-1)
        both = jnp.pad(both, ((0, 0), (0, kv_heads % 2), (0, 0)))
        return both.reshape(tokens, heads.words, 2, heads.lanes)
    return _pad_last(jnp.stack([k, v], axis=2), heads.lanes)


def write_kv(
    kv_layer: TpuPages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
    *,
    interpret: Any,
) -> TpuPages:
    """Stores each token at its place, in place; a place past the pool is dropped.

    Args:
      kv_layer: The pages; donated.
      k: Keys.
      v: Values.
      slot_mapping: Place of each token; unique, never negative.
      interpret: As pallas_call takes it.
    """
    pages = pl.pallas_call(
        _write_body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(kv_layer.pages.shape, kv_layer.pages.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(
            has_side_effects=True, disable_bounds_checks=True, disable_semaphore_checks=True
        ),
        interpret=interpret,
        name="write_kv",
    )(slot_mapping, pack_tokens(k, v), in_place(kv_layer.pages, interpret))
    return TpuPages(pages, kv_layer.kv_heads)


def in_place(pages: jax.Array, interpret: Any) -> jax.Array:
    """Pages for a kernel to find in HBM: XLA would move a pool that fits VMEM there and back."""
    return pages if interpret else pltpu.with_memory_space_constraint(pages, pltpu.HBM)


def page_and_offset(place: jax.Array, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Page of a place and the place inside it.

    Only these two, both below 2^31, are ever computed as numbers: DMA addresses are built from
    them in units that reach past 2^31 elements.
    """
    return lax.div(place, jnp.int32(page_size)), lax.rem(place, jnp.int32(page_size))


def wait_for(destination: Any, semaphore: Any) -> None:
    """Waits until copies onto a semaphore have moved as many bytes as the destination has."""
    pltpu.make_async_copy(destination, destination, semaphore).wait()


def _write_body(slot_mapping: Any, tokens: Any, _: Any, pages: Any, done: Any) -> None:
    """One small DMA per token, all in flight together, and one wait for their bytes."""
    num_pages, page_size = pages.shape[:2]

    def store(token: jax.Array, stored: jax.Array) -> jax.Array:
        place = slot_mapping[token]
        is_stored = place < num_pages * page_size

        @pl.when(is_stored)
        def _() -> None:
            page, offset = page_and_offset(place, page_size)
            pltpu.make_async_copy(tokens.at[token], pages.at[page, offset], done).start()

        return stored + is_stored.astype(jnp.int32)

    stored = lax.fori_loop(0, tokens.shape[0], store, jnp.int32(0))

    @pl.when(stored > 0)
    def _() -> None:
        wait_for(tokens.at[pl.ds(0, stored)], done)


def _pad_last(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])

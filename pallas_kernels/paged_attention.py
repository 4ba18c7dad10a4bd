"""The attention contract: what a step's tokens may see, and one call a layer to attend.

Tokens of a step are `rows` decode rows (one token each) followed by a chunk of prompt tokens that
belong to a few segments. `PagedBatch` says where their KV goes and what they read; its work lists
are built once per step on the device, before the layers, which all share them.

Today the plain-JAX reference is the only backend; TPU and GPU kernels join behind these names.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from . import reference_cache, reference_decode, reference_prefill
from .reference_cache import KVLayer
from .reference_decode import DecodeWork
from .reference_prefill import PrefillWork

allocate = reference_cache.allocate
bytes_per_page = reference_cache.bytes_per_page


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Runs of the chunk: consecutive prompt tokens of one request each, packed in order.

    Attributes:
      page_table: Pages of each segment's request.
      kv_lens: Tokens of the request up to and including the segment's last.
      q_lens: Tokens of the segment; 0: not used.
    """

    page_table: Int32[Array, "segments columns"]
    kv_lens: Int32[Array, " segments"]
    q_lens: Int32[Array, " segments"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedBatch:
    """Where one step's tokens write their KV and what they read.

    Attributes:
      positions: Position of each token in its request; 0 where it is padding.
      slot_mapping: page * page_size + offset of each token; a padded token i points to index
        size + i, past the pool, and is dropped.
      decode: Work of the decode rows.
      prefill: Work of the chunk; None in a decode step.
    """

    positions: Int32[Array, " tokens"]
    slot_mapping: Int32[Array, " tokens"]
    decode: DecodeWork
    prefill: PrefillWork | None


def paged_batch(
    page_table: Int32[Array, "rows columns"],
    kv_lens: Int32[Array, " rows"],
    segments: Segments | None,
    *,
    chunk: int,
    page_size: int,
    num_pages: int,
) -> PagedBatch:
    """Builds the work lists of one step; what each token writes is the last thing it sees.

    Args:
      page_table: Pages of each decode row; entries past its length may hold any valid page.
      kv_lens: Tokens each decode row sees, its own included; 0: a padded row, which returns zeros.
      segments: What the chunk holds; None: there is no chunk.
      chunk: Tokens of the chunk, padding included.
      page_size: Tokens per page.
      num_pages: Pages of the pool.
    """
    rows = kv_lens.shape[0]
    decode = reference_decode.decode_work(page_table, kv_lens, page_size=page_size)
    positions, live, pages = kv_lens - 1, kv_lens > 0, page_table
    owner, prefill = jnp.arange(rows), None
    if segments is not None:
        prefill = reference_prefill.prefill_work(
            segments.page_table, segments.kv_lens, segments.q_lens, chunk=chunk, page_size=page_size
        )
        used = prefill.segment_of < segments.q_lens.shape[0]
        pages = jnp.concatenate([pages, segments.page_table])
        owner = jnp.concatenate([owner, rows + jnp.where(used, prefill.segment_of, 0)])
        positions = jnp.concatenate([positions, prefill.position_of])
        live = jnp.concatenate([live, used])
    positions = jnp.where(live, positions, 0)
    place = pages[owner, positions // page_size] * page_size + positions % page_size
    past_the_pool = num_pages * page_size + jnp.arange(rows + chunk)
    slot_mapping = jnp.where(live, place, past_the_pool).astype(jnp.int32)
    return PagedBatch(positions.astype(jnp.int32), slot_mapping, decode, prefill)


def attend(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_layer: KVLayer,
    batch: PagedBatch,
    *,
    scale: float,
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVLayer]:
    """Writes the tokens' keys and values into one layer's pages, then attends over the pages.

    Donates kv_layer: within a jitted step that donates the pages the write is in place.

    Args:
      q: Queries; head n reads kv head n // (q_heads / kv_heads).
      k: Keys, rotated.
      v: Values.
      kv_layer: One layer's pages in this backend's layout.
      batch: What the tokens write and see.
      scale: Multiplies q k^T; usually head_dim ** -0.5.

    Returns:
      What each token attended to, float32, and the pages.
    """
    kv_layer = reference_cache.write_kv(kv_layer, k, v, batch.slot_mapping)
    rows = batch.decode.num_rows
    decoded = reference_decode.decode_attention(q[:rows], kv_layer, batch.decode, scale=scale)
    if batch.prefill is None:
        return decoded, kv_layer
    prefilled = reference_prefill.prefill_attention(q[rows:], kv_layer, batch.prefill, scale=scale)
    return jnp.concatenate([decoded, prefilled]), kv_layer

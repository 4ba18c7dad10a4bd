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
class PagedBatch:
    """Where one step's tokens write their KV and what they read.

    Attributes:
      slot_mapping: int32 [tokens]: page * page_size + offset of each token; a padded token points
        past the pool, each at an index of its own, and is dropped.
      decode: Work of the decode rows.
      prefill: Work of the chunk; None in a decode step.
    """

    slot_mapping: Int32[Array, " tokens"]
    decode: DecodeWork
    prefill: PrefillWork | None


def paged_batch(
    slot_mapping: Int32[Array, " tokens"],
    page_table: Int32[Array, "rows columns"],
    kv_lens: Int32[Array, " rows"],
    segments: tuple[
        Int32[Array, "segments columns"], Int32[Array, " segments"], Int32[Array, " segments"]
    ]
    | None,
    *,
    page_size: int,
) -> PagedBatch:
    """Builds the work lists of one step.

    Args:
      slot_mapping: See PagedBatch.
      page_table: Pages of each decode row; entries past its length may hold anything valid.
      kv_lens: Tokens each decode row sees, its own included; 0: a padded row, which returns zeros.
      segments: For the chunk, page table, kv_lens and query lengths of its segments, packed in
        order; a segment's queries are the last of its kv_lens tokens. None: there is no chunk.
      page_size: Tokens per page.
    """
    decode = reference_decode.decode_work(page_table, kv_lens, page_size=page_size)
    if segments is None:
        return PagedBatch(slot_mapping, decode, None)
    chunk = slot_mapping.shape[0] - kv_lens.shape[0]
    prefill = reference_prefill.prefill_work(*segments, chunk=chunk, page_size=page_size)
    return PagedBatch(slot_mapping, decode, prefill)


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
    prefilled = reference_prefill.prefill_attention(
        q[rows:], kv_layer, batch.prefill, scale=scale
    )
    return jnp.concatenate([decoded, prefilled]), kv_layer

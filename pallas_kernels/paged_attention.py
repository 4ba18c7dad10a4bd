"""What a step's tokens write and see, and one call a layer to attend.

Tokens of a step are `rows` decode rows (one token each) followed by a chunk of prompt tokens that
belong to a few segments. `PagedBatch` says where their KV goes and what they read; its work lists
are built once per step on the device, before the layers, which all share them.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .backend import AttentionBackend, KVLayer, Scoring, Work
from .chunk_tokens import Segments, chunk_tokens


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
      rows: Decode rows of the step.
      backend: Whose work lists these are.
    """

    positions: Int32[Array, " tokens"]
    slot_mapping: Int32[Array, " tokens"]
    decode: Work
    prefill: Work | None
    rows: int = field(metadata={"static": True})
    backend: AttentionBackend = field(metadata={"static": True})


def paged_batch(
    backend: AttentionBackend,
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
      backend: Who will attend.
      page_table: Pages of each decode row; entries past its length may hold anything.
      kv_lens: Tokens each decode row sees, its own included; 0: a padded row, which returns zeros.
      segments: What the chunk holds; None: there is no chunk.
      chunk: Tokens of the chunk, padding included.
      page_size: Tokens per page.
      num_pages: Pages of the pool.
    """
    rows = kv_lens.shape[0]
    decode = backend.decode_work(page_table, kv_lens, page_size=page_size)
    positions, live, pages = kv_lens - 1, kv_lens > 0, page_table
    owner, prefill = jnp.arange(rows), None
    if segments is not None:
        tokens = chunk_tokens(segments, chunk)
        prefill = backend.prefill_work(segments, tokens, page_size=page_size)
        used = tokens.segment_of < segments.q_lens.shape[0]
        pages = jnp.concatenate([pages, segments.page_table])
        owner = jnp.concatenate([owner, rows + jnp.where(used, tokens.segment_of, 0)])
        positions = jnp.concatenate([positions, tokens.position_of])
        live = jnp.concatenate([live, used])
    positions = jnp.where(live, positions, 0)
    place = pages[owner, positions // page_size] * page_size + positions % page_size
    past_the_pool = num_pages * page_size + jnp.arange(rows + chunk)
    slot_mapping = jnp.where(live, place, past_the_pool).astype(jnp.int32)
    return PagedBatch(positions.astype(jnp.int32), slot_mapping, decode, prefill, rows, backend)


def attend(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv_layer: KVLayer,
    batch: PagedBatch,
    scoring: Scoring,
    *,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scale: Float[Array, ""] | float | None = None,
    v_scale: Float[Array, ""] | float | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVLayer]:
    """Writes the tokens' keys and values into one layer's pages, then attends over the pages.

    Donates kv_layer: within a jitted step that donates the pages the write is in place.

    Args:
      q: Queries; head n reads kv head n // (q_heads / kv_heads).
      k: Keys, rotated.
      v: Values.
      kv_layer: One layer's pages in the backend's layout.
      batch: What the tokens write and see.
      scoring: How queries and keys become scores.
      sinks: A score per head that takes part in the softmax and has no value. None: none.
      k_scale: Keys are kept divided by this, so that they fit the pages' dtype. None: as they are.
      v_scale: Values, likewise.

    Returns:
      What each token attended to, float32, and the pages.
    """
    backend, rows = batch.backend, batch.rows
    # Scales of a whole layer need nothing of a kernel: they fold into queries and outputs.
    if k_scale is not None:
        k, q = k / k_scale, q * k_scale
    if v_scale is not None:
        v = v / v_scale
    kv_layer = backend.write_kv(kv_layer, k, v, batch.slot_mapping)
    attended = backend.decode_attention(q[:rows], kv_layer, batch.decode, scoring, sinks)
    if batch.prefill is not None:
        prefilled = backend.prefill_attention(q[rows:], kv_layer, batch.prefill, scoring, sinks)
        attended = jnp.concatenate([attended, prefilled])
    attended = attended.astype(jnp.float32)
    return attended if v_scale is None else attended * v_scale, kv_layer

"""Prefill attention in plain JAX: a chunk of prompt tokens over the pages of their segments.

The chunk is cut into tiles of queries. A flat work list says which tile reads which block of which
segment's pages, in order; one loop runs it, with a trip count taken from the lengths. A tile that
spans two segments is visited for each, and masked. Blocks past a tile's last token are not listed,
so causal skipping is exact to a block. The sum of a query runs over its own segment's blocks from
page 0, so it depends on nothing else in the chunk.
Source: FlashAttention-2, Algorithm 1, https://arxiv.org/abs/2307.08691; work lists as in JAX's
ragged paged attention.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from .backend import Scoring
from .chunk_tokens import ChunkTokens, Segments
from .reference_cache import ReferencePages
from .reference_decode import capped, initial_softmax, pages_per_block, whole_blocks

TILE_TOKENS = 64  # queries that share one visit to a block of KV


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillWork:
    """What the tiles of one chunk read.

    Attributes:
      tokens: Segment and position of each chunk token.
      page_table: Of the segments, padded to whole blocks with page 0.
      item_tile: Tile of each work item; items of a tile are consecutive.
      item_segment: Segment whose pages the item reads.
      item_block: Block of that segment's pages.
      num_items: How many items of the list are real.
    """

    tokens: ChunkTokens
    page_table: Int32[Array, "segments columns"]
    item_tile: Int32[Array, " items"]
    item_segment: Int32[Array, " items"]
    item_block: Int32[Array, " items"]
    num_items: Int32[Array, ""]


def tile_tokens(chunk: int) -> int:
    """Queries per tile: TILE_TOKENS, or the whole chunk where it is smaller or does not divide."""
    return TILE_TOKENS if chunk % TILE_TOKENS == 0 else chunk


def prefill_work(segments: Segments, tokens: ChunkTokens, *, page_size: int) -> PrefillWork:
    """Lists the work of one chunk, as AttentionBackend says."""
    kv_lens, q_lens = segments.kv_lens, segments.q_lens
    num_segments = q_lens.shape[0]
    chunk = tokens.segment_of.shape[0]
    block = pages_per_block(page_size)
    block_tokens, tile = block * page_size, tile_tokens(chunk)
    page_table = whole_blocks(segments.page_table, kv_lens, page_size=page_size)
    most_blocks = page_table.shape[1] // block

    ends = jnp.cumsum(q_lens)
    starts = ends - q_lens

    # Visits: every (tile, segment) pair that overlaps, and the blocks it needs. At most
    # tiles + segments - 1 pairs overlap, each over at most most_blocks blocks.
    tile_start = jnp.arange(chunk // tile)[:, None] * tile
    last_query = jnp.minimum(ends, tile_start + tile) - 1
    overlaps = last_query >= jnp.maximum(starts, tile_start)
    last_position = kv_lens - ends + last_query
    visit_blocks = jnp.where(overlaps, last_position // block_tokens + 1, 0).reshape(-1)
    visit_ends = jnp.cumsum(visit_blocks)
    most_items = (chunk // tile + num_segments - 1) * most_blocks
    item = jnp.arange(most_items)
    visit = (visit_ends <= item[:, None]).sum(-1)
    visit = jnp.minimum(visit, visit_blocks.shape[0] - 1)  # past the list: any visit will do
    return PrefillWork(
        tokens=tokens,
        page_table=page_table,
        item_tile=(visit // num_segments).astype(jnp.int32),
        item_segment=(visit % num_segments).astype(jnp.int32),
        item_block=(item - (visit_ends - visit_blocks)[visit]).astype(jnp.int32),
        num_items=visit_ends[-1].astype(jnp.int32),
    )


def prefill_attention(
    q: Float[Array, "chunk q_heads head_dim"],
    kv_layer: ReferencePages,
    work: PrefillWork,
    scoring: Scoring,
    sinks: Float[Array, " q_heads"] | None,
) -> Float[Array, "chunk q_heads head_dim"]:
    """Attends every chunk token over its request's tokens, as AttentionBackend says.

    The chunk's own keys and values are already in the pages.
    """
    chunk, q_heads, head_dim = q.shape
    dtype, width = kv_layer.k.dtype, kv_layer.k.shape[2]
    kv_heads = width // head_dim
    group, tile = q_heads // kv_heads, tile_tokens(chunk)
    page_size, block = kv_layer.page_size, pages_per_block(kv_layer.page_size)
    tokens = block * page_size
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None

    # [kv_heads, chunk, group, head_dim]: a tile of one kv head's queries is one matrix.
    q = (q * scoring.scale).astype(dtype).reshape(chunk, kv_heads, group, head_dim).swapaxes(0, 1)

    def run_item(index: Int32[Array, ""], carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = work.item_tile[index] * tile
        segment, block_index = work.item_segment[index], work.item_block[index]
        pages = lax.dynamic_slice(work.page_table, (segment, block_index * block), (1, block))[0]
        k = kv_layer.k.at[pages].get(mode="promise_in_bounds").reshape(tokens, kv_heads, head_dim)
        v = kv_layer.v.at[pages].get(mode="promise_in_bounds").reshape(tokens, kv_heads, head_dim)
        kv_position = block_index * tokens + jnp.arange(tokens)
        position = lax.dynamic_slice(work.tokens.position_of, (first,), (tile,))
        belongs = lax.dynamic_slice(work.tokens.segment_of, (first,), (tile,)) == segment
        seen = belongs[:, None] & (kv_position <= position[:, None])
        if scoring.window is not None:
            seen &= kv_position > position[:, None] - scoring.window
        # No query of the tile sees past its last token of the segment; 0 * NaN would be NaN.
        v = jnp.where(seen.any(0)[:, None, None], v, 0)

        # One product per kv head, group * tile rows each.
        scores = lax.dot_general(
            lax.dynamic_slice_in_dim(q, first, tile, axis=1).reshape(kv_heads, -1, head_dim),
            k,
            (((2,), (2,)), ((0,), (1,))),
            precision=precision,
            preferred_element_type=jnp.float32,
        ).reshape(kv_heads, tile, group, tokens)
        scores = capped(lax.optimization_barrier(scores), scoring.softcap)
        scores = jnp.where(seen[None, :, None], scores, -jnp.inf)
        high, total, mixed = (lax.dynamic_slice_in_dim(part, first, tile, 1) for part in carry)
        new_high = jnp.maximum(high, scores.max(-1))
        weights = jnp.exp(scores - new_high[..., None])
        fade = jnp.exp(high - new_high)
        mixed_block = lax.dot_general(
            weights.astype(dtype).reshape(kv_heads, -1, tokens),
            v,
            (((2,), (0,)), ((0,), (1,))),
            precision=precision,
            preferred_element_type=jnp.float32,
        ).reshape(kv_heads, tile, group, head_dim)
        mixed_block = lax.optimization_barrier(mixed_block)
        # Queries of other segments have weight 0 for all of it, and 0 * NaN would be NaN.
        own = belongs[:, None]
        updated = (
            jnp.where(own, new_high, high),
            jnp.where(own, total * fade + weights.sum(-1), total),
            jnp.where(own[..., None], mixed * fade[..., None] + mixed_block, mixed),
        )
        return tuple(
            lax.dynamic_update_slice_in_dim(part, new, first, 1)
            for part, new in zip(carry, updated, strict=True)
        )

    high, total = (
        part.reshape(chunk, kv_heads, group).swapaxes(0, 1)
        for part in initial_softmax(sinks, (chunk, q_heads))
    )
    carry = (high, total, jnp.zeros((kv_heads, chunk, group, head_dim), jnp.float32))
    _, total, mixed = lax.fori_loop(0, work.num_items, run_item, carry)
    mixed = mixed / jnp.where(total > 0, total, 1)[..., None]
    return mixed.swapaxes(0, 1).reshape(chunk, q_heads, head_dim)

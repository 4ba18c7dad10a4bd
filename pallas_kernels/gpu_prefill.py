"""Prefill attention on GPUs in Pallas (Mosaic GPU): one source for A100, Hopper and B200.

A block of one warpgroup takes up to 64 queries: some tokens of one segment, with all query heads of
one kv head. It runs a softmax over the segment's pages up to its last token (FlashAttention-2,
Algorithm 1, https://arxiv.org/abs/2307.08691), so nothing of another segment is ever read. Products
are `mma.sync`, which every one of these chips has.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from . import gpu_copies, gpu_softmax
from .backend import LOWEST, Scoring
from .gpu_budget import QUERIES, THREADS, KernelPlan, holds_queries
from .gpu_cache import pad_heads
from .gpu_copies import PageRing, Pages, Scalar
from .gpu_softmax import LOG2_E, along_rows, full, store
from .gpu_work import TILE_FIELDS, TILE_TOKENS, PrefillWork

# Warps divide the rows of a product, and each of them holds all of its right side. Pieces of that
# leave registers for the rest.
_ACC = plgpu.Layout.MMA_ACC(jnp.dtype(jnp.bfloat16), m_warps=4)
_LHS = plgpu.Layout.MMA_LHS(jnp.dtype(jnp.bfloat16), m_warps=4)
_RHS = plgpu.Layout.MMA_RHS(jnp.dtype(jnp.bfloat16), m_warps=4)
HEAD_PIECE = 64
_TOKEN_PIECE = 32


def prefill_attention(
    q: Float[Array, "chunk q_heads head_dim"],
    kv_pages: Float[Array, "pages page_size kv_sides width"],
    work: PrefillWork,
    plan: KernelPlan,
    scoring: Scoring,
    sinks: Float[Array, " q_heads"] | None,
    *,
    has_tma: bool,
    interpret: Any,
) -> Float[Array, "chunk q_heads head_dim"]:
    """Attends every chunk token over its segment; see AttentionBackend.prefill_attention.

    Returns:
      bfloat16.
    """
    chunk, q_heads, head_dim = q.shape
    _, page_size, sides, width = kv_pages.shape
    kv_heads, dtype, tile = sides // 2, kv_pages.dtype, plan.kv_tile
    group = q_heads // kv_heads
    ring = PageRing(page_size, tile, plan.stages, width, has_tma)
    block_tokens = QUERIES // group
    parts = -(-min(chunk, TILE_TOKENS) // block_tokens)

    # Queries of a kv head by token, then head. A block reads 64 of them from its first token on:
    # what is none of its own is never stored.
    q = pad_heads(q, width).astype(dtype).reshape(chunk, kv_heads, group, width)
    q = q.swapaxes(0, 1).reshape(kv_heads, chunk * group, width)
    q = jnp.pad(q, ((0, 0), (0, QUERIES - 1), (0, 0)))
    # No sink is one that weighs nothing.
    lowest = jnp.full(q_heads, LOWEST, jnp.float32)
    base_2_sinks = lowest if sinks is None else jnp.maximum(sinks * LOG2_E, lowest)
    base_2_sinks = base_2_sinks.reshape(kv_heads, group)[:, jnp.arange(QUERIES) % group]

    def prefill_block(
        q_ref: Any,
        kv_ref: Any,
        page_table: Any,
        tiles: Any,
        sinks_ref: Any,
        out_ref: Any,
        *,
        weights_s: Any,
        rows_s: Any,
        slots: Any,
        query_s: Any = None,
        barriers: Any = None,
    ) -> None:
        entry, part, head = (lax.axis_index(name) for name in ("tile", "part", "head"))

        def field(name: str) -> Scalar:
            return tiles[entry, TILE_FIELDS.index(name)]

        skipped = part * block_tokens
        tokens = jnp.minimum(field("tokens") - skipped, block_tokens)

        def attend() -> None:
            segment, first_token = field("segment"), field("first_token") + skipped
            first_position = field("first_position") + skipped
            # Padding sees nothing and so gives zeros.
            kv_len = jnp.where(field("is_padding") > 0, 0, first_position + tokens)
            seen_from = gpu_softmax.first_seen(first_position + 1, scoring.window)
            first_query = first_token * group

            def page_of(column: Scalar) -> Scalar:
                return page_table[segment, column]

            # The first query is no multiple of 8, so nothing but registers can take them.
            own = q_ref.at[head, pl.ds(first_query, QUERIES)]
            query = plgpu.load(own, layout=_LHS, optimized=False)
            if query_s is not None:
                query_s[...] = query
            shape = (QUERIES, tile)
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_ACC)
            position = first_position + lax.div(row, jnp.int32(group))
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_ACC)

            def query_piece(piece: int) -> jax.Array:
                if query_s is None:
                    return query[:, piece : piece + HEAD_PIECE]
                return plgpu.load(query_s.at[:, pl.ds(piece, HEAD_PIECE)], layout=_LHS)

            def values_of(index: Scalar, slot: Scalar, token: int, piece: int) -> jax.Array:
                columns = pl.ds(width + piece, HEAD_PIECE)
                values = slots.at[slot, pl.ds(token, _TOKEN_PIECE), columns]
                values, first = plgpu.load(values, layout=_RHS), index * tile + token
                return gpu_softmax.clear_unseen(values, first, seen_from, kv_len, _RHS)

            def read(index: Scalar, slot: Scalar, carry: Any) -> Any:
                high, total, mixed = carry  # running maximum, sum of weights, weighted values
                products = full(shape, 0.0, _ACC)
                for piece in range(0, width, HEAD_PIECE):
                    keys = slots.at[slot, :, pl.ds(piece, HEAD_PIECE)].T
                    keys = plgpu.load(keys, layout=_RHS)
                    products = plgpu.mma(products, query_piece(piece), keys)
                token = column + index * tile
                seen = token <= position
                if scoring.window is not None:
                    seen = seen & (token > position - scoring.window)
                scores = gpu_softmax.mask_scores(gpu_softmax.base_2(products, scoring), seen)
                high, fade, weights = gpu_softmax.weigh(scores, high)
                mixed = tuple(piece * along_rows(fade, piece) for piece in mixed)
                # An accumulator's layout is not a left side's: weights go through shared memory.
                weights_s[...] = weights.astype(dtype)
                for first in range(0, tile, _TOKEN_PIECE):
                    some = plgpu.load(weights_s.at[:, pl.ds(first, _TOKEN_PIECE)], layout=_LHS)
                    mixed = tuple(
                        plgpu.mma(piece, some, values_of(index, slot, first, at * HEAD_PIECE))
                        for at, piece in enumerate(mixed)
                    )
                return high, total * fade + weights.sum(axis=1), mixed

            # A sink is a token that is seen first and has no value.
            sink = plgpu.load(sinks_ref.at[head], layout=_ACC.reduce(1), optimized=False)
            carry = (
                sink,
                jnp.where(sink > LOWEST, 1.0, 0.0),
                tuple(full((QUERIES, HEAD_PIECE), 0.0, _ACC) for _ in range(0, width, HEAD_PIECE)),
            )
            pages = Pages(ring, kv_ref, page_of, kv_len, head, slots, barriers)
            first = lax.div(seen_from, jnp.int32(tile))
            last = lax.div(kv_len + (tile - 1), jnp.int32(tile))
            _, total, mixed = gpu_copies.read_tiles(pages, first, last, read, carry)
            divisor = jnp.where(total == 0, 1, total)  # a NaN stays one
            for at, piece in enumerate(mixed):
                piece = (piece / along_rows(divisor, piece)).astype(dtype)
                target = out_ref.at[head, :, pl.ds(at * HEAD_PIECE, HEAD_PIECE)]
                _store_rows(piece, target, first_query, tokens * group, rows_s, multiple=group)

        pl.when(tokens > 0)(attend)

    swizzled = (
        plgpu.TilingTransform((8, _TOKEN_PIECE)),
        plgpu.SwizzleTransform(2 * _TOKEN_PIECE),
    )
    scratch = {
        "weights_s": plgpu.SMEM((QUERIES, tile), dtype, transforms=swizzled),
        "rows_s": plgpu.SMEM((QUERIES, HEAD_PIECE), dtype),
        **ring.scratch(),
    }
    if not holds_queries(width):
        swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        scratch["query_s"] = plgpu.SMEM((QUERIES, width), dtype, transforms=swizzled)
    out = plgpu.kernel(
        prefill_block,
        out_type=jax.ShapeDtypeStruct((kv_heads, chunk * group, width), dtype),
        scratch_types=scratch,
        # The last axis runs first: heads side by side read whole pages.
        grid=(work.tiles.shape[0], parts, kv_heads),
        grid_names=("tile", "part", "head"),
        # A row lies in one warp: to reduce it takes no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="octavo_prefill",
        interpret=interpret,
    )(
        q,
        kv_pages.reshape(*kv_pages.shape[:2], sides * width),
        work.page_table,
        work.tiles,
        base_2_sinks,
    )
    out = out.reshape(kv_heads, chunk, group, width).swapaxes(0, 1)
    return out.reshape(chunk, q_heads, width)[..., :head_dim]


def _store_rows(
    values: jax.Array, target: Any, first: Scalar, count: Scalar, rows_s: Any, *, multiple: int
) -> None:
    """Stores the first `count` rows of a block: those behind them are another block's.

    Args:
      values: All rows.
      target: Rows in device memory.
      first: Where the first row goes.
      count: How many.
      rows_s: Shared memory for all rows.
      multiple: What divides count.
    """

    @pl.when(count == QUERIES)
    def _() -> None:
        store(target.at[pl.ds(first, QUERIES)], values)

    @pl.when(count < QUERIES)
    def _() -> None:
        store(rows_s, values)
        # In as many pieces as count has bits: 32 rows, then 16, down to what divides it.
        size = QUERIES // 2
        while size and multiple % (2 * size):
            pl.when(count & size > 0)(partial(_copy_rows, rows_s, target, first, count, size))
            size //= 2


def _copy_rows(rows_s: Any, target: Any, first: Scalar, count: Scalar, size: int) -> None:
    """Stores the rows that one bit of count stands for."""
    start = count & -(2 * size)
    if size * HEAD_PIECE % THREADS == 0:
        layout = plgpu.Layout.WG_STRIDED((size, HEAD_PIECE), vec_size=1)
        rows = plgpu.load(rows_s.at[pl.ds(start, size)], layout=layout, optimized=False)
        store(target.at[pl.ds(first + start, size)], rows)
    else:
        layout = plgpu.Layout.WGMMA.reduce(0)
        row = plgpu.load(rows_s.at[start], layout=layout, optimized=False)
        store(target.at[first + start], row)

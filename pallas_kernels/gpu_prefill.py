"""Prefill attention on GPUs in Pallas (Mosaic GPU): one source for Ampere, Hopper and Blackwell.

A block of one warpgroup takes one query head of a tile of chunk tokens and runs a softmax over the
pages of the tile's segment up to its last token (FlashAttention-2, Algorithm 1,
https://arxiv.org/abs/2307.08691). A tile belongs to one segment, so nothing of another one is ever
read. Products are `mma.sync`, which every one of these chips has.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from . import gpu_copies, gpu_softmax
from .gpu_budget import QUERY_TILE, KernelPlan, holds_queries
from .gpu_cache import pad_heads
from .gpu_copies import PageRing, Pages, Scalar
from .gpu_softmax import LOG2_E, LOWEST, Scoring, along_rows, full
from .gpu_work import TILE_FIELDS, PrefillWork

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
    group, dtype, tile = q_heads // (sides // 2), kv_pages.dtype, plan.kv_tile
    ring = PageRing(page_size, tile, plan.stages, width, has_tma)

    # A block reads a whole tile from its first token on; what is no token of it is never stored.
    q = pad_heads(q, width).astype(dtype).reshape(chunk, q_heads * width)
    q = jnp.pad(q, ((0, QUERY_TILE - 1), (0, 0)))
    # No sink is one that weighs nothing.
    lowest = jnp.full(q_heads, LOWEST, jnp.float32)
    base_2_sinks = lowest if sinks is None else jnp.maximum(sinks * LOG2_E, lowest)

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
        q_head, tile_index = lax.axis_index("head"), lax.axis_index("tile")
        segment, first_token, tokens, first_position, kv_len = (
            tiles[tile_index, field] for field in range(len(TILE_FIELDS))
        )
        head = lax.div(q_head, jnp.int32(group))
        seen_from = scoring.first_seen(first_position + 1)

        def page_of(column: Scalar) -> Scalar:
            return page_table[segment, column]

        def columns_of(piece: int, count: int) -> Any:
            return pl.ds(pl.multiple_of(q_head * width + piece, count), count)

        def attend() -> None:
            # The first token is no multiple of 8, so nothing but registers can take the queries.
            own = q_ref.at[pl.ds(first_token, QUERY_TILE), columns_of(0, width)]
            query = plgpu.load(own, layout=_LHS, optimized=False)
            if query_s is not None:
                query_s[...] = query
            shape = (QUERY_TILE, tile)
            position = first_position + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_ACC)
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
                products = full(shape, 0, _ACC)
                for piece in range(0, width, HEAD_PIECE):
                    keys = slots.at[slot, :, pl.ds(piece, HEAD_PIECE)].T
                    keys = plgpu.load(keys, layout=_RHS)
                    products = plgpu.mma(products, query_piece(piece), keys)
                token = column + index * tile
                seen = token <= position
                if scoring.window is not None:
                    seen = seen & (token > position - scoring.window)
                scores = gpu_softmax.mask_scores(scoring.base_2(products), seen)
                high, fade, weights = gpu_softmax.weigh(scores, high)
                mixed = tuple(part * along_rows(fade, part) for part in mixed)
                # An accumulator's layout is not a left side's: weights go through shared memory.
                weights_s[...] = weights.astype(dtype)
                for first in range(0, tile, _TOKEN_PIECE):
                    some = plgpu.load(weights_s.at[:, pl.ds(first, _TOKEN_PIECE)], layout=_LHS)
                    mixed = tuple(
                        plgpu.mma(part, some, values_of(index, slot, first, at * HEAD_PIECE))
                        for at, part in enumerate(mixed)
                    )
                return high, total * fade + weights.sum(axis=1), mixed

            # A sink is a token that is seen first and has no value.
            sink = sinks_ref[q_head]
            carry = (
                full((QUERY_TILE,), sink, _ACC.reduce(1)),
                full((QUERY_TILE,), jnp.where(sink > LOWEST, 1.0, 0.0), _ACC.reduce(1)),
                tuple(full((QUERY_TILE, HEAD_PIECE), 0, _ACC) for _ in range(0, width, HEAD_PIECE)),
            )
            pages = Pages(ring, kv_ref, page_of, kv_len, head, slots, barriers)
            first = lax.div(seen_from, jnp.int32(tile))
            last = lax.div(kv_len + (tile - 1), jnp.int32(tile))
            _, total, mixed = gpu_copies.read_tiles(pages, first, last, read, carry)
            divisor = jnp.where(total == 0, 1, total)  # padding has seen nothing; a NaN stays one
            for at, part in enumerate(mixed):
                part = (part / along_rows(divisor, part)).astype(dtype)
                _store_tile(
                    part,
                    out_ref,
                    first_token,
                    tokens,
                    columns_of(at * HEAD_PIECE, HEAD_PIECE),
                    rows_s,
                )

        pl.when(tokens > 0)(attend)

    swizzled = (
        plgpu.TilingTransform((8, _TOKEN_PIECE)),
        plgpu.SwizzleTransform(2 * _TOKEN_PIECE),
    )
    scratch = {
        "weights_s": plgpu.SMEM((QUERY_TILE, tile), dtype, transforms=swizzled),
        "rows_s": plgpu.SMEM((QUERY_TILE, HEAD_PIECE), dtype),
        **ring.scratch(),
    }
    if not holds_queries(width):
        swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        scratch["query_s"] = plgpu.SMEM((QUERY_TILE, width), dtype, transforms=swizzled)
    out = plgpu.kernel(
        prefill_block,
        out_type=jax.ShapeDtypeStruct((chunk, q_heads * width), dtype),
        scratch_types=scratch,
        # The last axis runs first: heads side by side find the pages that they share in the cache.
        grid=(work.tiles.shape[0], q_heads),
        grid_names=("tile", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="octavo_prefill",
        interpret=interpret,
    )(
        q,
        kv_pages.reshape(*kv_pages.shape[:2], sides * width),
        work.page_table,
        work.tiles,
        base_2_sinks,
    )
    return out.reshape(chunk, q_heads, width)[..., :head_dim]


def _store_tile(
    part: jax.Array, out_ref: Any, first_token: Scalar, tokens: Scalar, columns: Any, rows_s: Any
) -> None:
    """Stores the first `tokens` rows of a tile: those behind them are another tile's."""

    @pl.when(tokens == QUERY_TILE)
    def _() -> None:
        plgpu.store(out_ref.at[pl.ds(first_token, QUERY_TILE), columns], part, optimized=False)

    @pl.when(tokens < QUERY_TILE)
    def _() -> None:
        plgpu.store(rows_s, part, optimized=False)

        @pl.loop(0, tokens)
        def _(row: jax.Array) -> None:
            layout = plgpu.Layout.WGMMA.reduce(0)
            own = plgpu.load(rows_s.at[row], layout=layout, optimized=False)
            plgpu.store(out_ref.at[first_token + row, columns], own, optimized=False)

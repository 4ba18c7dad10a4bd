"""Decode attention on GPUs in Pallas (Mosaic GPU): one source for A100, Hopper and B200.

A block of one warpgroup takes one kv head of one row, or a share of its tokens, and runs a softmax
over tiles of its pages (FlashAttention-2, Algorithm 1, https://arxiv.org/abs/2307.08691; paging as
in https://arxiv.org/abs/2309.06180). The query heads of the kv head are the 16 rows of `mma.sync`,
which every one of these chips has; decode waits for memory, so a faster product would gain nothing.
Where rows are few, several blocks share a row and their results are combined by what each of them
summed (Flash-Decoding). How tokens are dealt to blocks depends on the row's own length alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from . import gpu_copies, gpu_softmax
from .backend import LOWEST, Scoring
from .gpu_budget import MAX_GROUP, THREADS, KernelPlan
from .gpu_cache import pad_heads
from .gpu_copies import PageRing, Pages, Scalar
from .gpu_softmax import LOG2_E, along_rows, full, store
from .gpu_work import DecodeWork

# Warps share the 16 rows of a product and divide its columns.
_ACC = plgpu.Layout.MMA_ACC(jnp.dtype(jnp.bfloat16), m_warps=1)
_LHS = plgpu.Layout.MMA_LHS(jnp.dtype(jnp.bfloat16), m_warps=1)
_RHS = plgpu.Layout.MMA_RHS(jnp.dtype(jnp.bfloat16), m_warps=1)


def split_range(
    kv_len: Scalar, seen_from: Scalar, split: Scalar, *, splits: int, tile: int
) -> tuple[Scalar, Scalar]:
    """Tiles [first, last) that one block reads of a row's [seen_from, kv_len); none: first >= last.

    In order, and in shares of one size, of which the last may be less.
    """
    begin = lax.div(seen_from, jnp.int32(tile))
    end = lax.div(kv_len + (tile - 1), jnp.int32(tile))
    share = lax.div(end - begin + (splits - 1), jnp.int32(splits))
    first = begin + split * share
    return first, jnp.minimum(first + share, end)


def stored_heads(group: int, width: int) -> int:
    """Heads that a block writes: its own, and one more where those don't fill its threads."""
    return group if group * width % THREADS == 0 else group + 1


def decode_attention(
    q: Float[Array, "rows q_heads head_dim"],
    kv_pages: Float[Array, "pages page_size kv_sides width"],
    work: DecodeWork,
    plan: KernelPlan,
    scoring: Scoring,
    sinks: Float[Array, " q_heads"] | None,
    *,
    has_tma: bool,
    interpret: Any,
) -> Float[Array, "rows q_heads head_dim"]:
    """Attends one query token per row; see AttentionBackend.decode_attention.

    Returns:
      bfloat16 where one block does all of a row, else float32.
    """
    rows, q_heads, head_dim = q.shape
    _, page_size, sides, width = kv_pages.shape
    kv_heads, dtype = sides // 2, kv_pages.dtype
    group, stored = q_heads // kv_heads, stored_heads(q_heads // kv_heads, width)
    tile, splits = plan.kv_tile, plan.splits
    ring = PageRing(page_size, tile, plan.stages, width, has_tma)
    is_whole = splits == 1 and sinks is None

    # A block reads 16 rows from its first head on: those of other heads give rows of their own,
    # which nobody uses.
    q = pad_heads(q, width).astype(dtype).reshape(rows * q_heads, width)
    q = jnp.pad(q, ((0, MAX_GROUP - 1), (0, 0)))
    mixed_shape = (rows, splits, kv_heads, stored, width)
    mixed_type = jax.ShapeDtypeStruct(mixed_shape, dtype if is_whole else jnp.float32)
    sums_type = jax.ShapeDtypeStruct((rows, splits, kv_heads, MAX_GROUP), jnp.float32)

    def decode_block(
        q_ref: Any,
        kv_ref: Any,
        page_table: Any,
        kv_lens: Any,
        mixed_ref: Any,
        *sums_ref: Any,
        weights_s: Any,
        mixed_s: Any,
        slots: Any,
        barriers: Any = None,
    ) -> None:
        row, split, head = (lax.axis_index(name) for name in ("row", "split", "head"))
        kv_len = kv_lens[row]
        seen_from = gpu_softmax.first_seen(kv_len, scoring.window)
        first, last = split_range(kv_len, seen_from, split, splits=splits, tile=tile)

        def page_of(column: Scalar) -> Scalar:
            return page_table[row, column]

        own_heads = pl.ds(row * q_heads + head * group, MAX_GROUP)
        query = plgpu.load(q_ref.at[own_heads], layout=_LHS, optimized=False)
        column = plgpu.broadcasted_iota(jnp.int32, (MAX_GROUP, tile), 1, layout=_ACC)

        def read(
            index: Scalar, slot: Scalar, carry: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, ...]:
            high, total, mixed = carry  # running maximum, weights by column, weighted values
            keys = plgpu.load(slots.at[slot, :, pl.ds(0, width)].T, layout=_RHS)
            products = plgpu.mma(full(column.shape, 0.0, _ACC), query, keys)
            token = column + index * tile
            seen = (token >= seen_from) & (token < kv_len)
            scores = gpu_softmax.mask_scores(gpu_softmax.base_2(products, scoring), seen)
            high, fade, weights = gpu_softmax.weigh(scores, high)
            # A warp has some tokens of all heads here and some columns of all tokens below:
            # weights change hands.
            weights_s[...] = weights.astype(dtype)
            values = plgpu.load(slots.at[slot, :, pl.ds(width, width)], layout=_RHS)
            values = gpu_softmax.clear_unseen(values, index * tile, seen_from, kv_len, _RHS)
            mixed = mixed * along_rows(fade, mixed)
            mixed = plgpu.mma(mixed, plgpu.load(weights_s, layout=_LHS), values)
            return high, total * along_rows(fade, total) + weights, mixed

        pages = Pages(ring, kv_ref, page_of, kv_len, head, slots, barriers)
        carry = (
            full((MAX_GROUP,), LOWEST, _ACC.reduce(1)),
            full(column.shape, 0.0, _ACC),
            full((MAX_GROUP, width), 0.0, _ACC),
        )
        high, total, mixed = gpu_copies.read_tiles(pages, first, last, read, carry)
        total = total.sum(axis=1)
        # Not `total > 0`: a NaN stays one, and tells of a request whose keys are not finite.
        is_empty = total == 0
        divisor = jnp.where(is_empty, 1, total)
        for ref in sums_ref:
            sums = jnp.where(is_empty, LOWEST, high + jnp.log2(divisor))
            store(ref.at[row, split, head], sums)

        # Without a tile there is nothing to combine; but a row that is all here must give zeros.
        @pl.when((first < last) | is_whole)
        def _() -> None:
            store(mixed_s, mixed / along_rows(divisor, mixed))
            by_thread = plgpu.Layout.WG_STRIDED((stored, width), vec_size=1)
            own = plgpu.load(mixed_s.at[pl.ds(0, stored)], layout=by_thread, optimized=False)
            target = mixed_ref.at[row, split, head]
            store(target, own.astype(mixed_type.dtype))

    swizzled = (
        plgpu.TilingTransform((8, min(64, tile))),
        plgpu.SwizzleTransform(2 * min(64, tile)),
    )
    mixed, *sums = plgpu.kernel(
        decode_block,
        out_type=(mixed_type,) if is_whole else (mixed_type, sums_type),
        scratch_types={
            "weights_s": plgpu.SMEM((MAX_GROUP, tile), dtype, transforms=swizzled),
            "mixed_s": plgpu.SMEM((MAX_GROUP, width), jnp.float32),
            **ring.scratch(),
        },
        # The last axis runs first: heads side by side read whole pages.
        grid=(rows, splits, kv_heads),
        grid_names=("row", "split", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="octavo_decode",
        interpret=interpret,
    )(q, kv_pages.reshape(*kv_pages.shape[:2], sides * width), work.page_table, work.kv_lens)

    mixed = mixed[:, :, :, :group]
    if sums:
        own_sinks = None if sinks is None else sinks.reshape(kv_heads, group)
        mixed = combine(mixed, sums[0][..., :group], own_sinks)
    return mixed.reshape(rows, q_heads, width)[..., :head_dim]


def combine(
    mixed: Float[Array, "rows splits kv_heads group width"],
    sums: Float[Array, "rows splits kv_heads group"],
    sinks: Float[Array, "kv_heads group"] | None,
) -> Float[Array, "rows kv_heads group width"]:
    """Weighs what the blocks of a row found by what each of them summed.

    Args:
      mixed: Weighted means of values; of any content where a block had no tokens.
      sums: Base 2 logarithms of the sums of weights; LOWEST where a block had no tokens.
      sinks: Scores that take part and have no value.
    """
    is_empty = sums == LOWEST
    high = sums.max(1)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32) * LOG2_E
        high = jnp.maximum(high, sinks)
    weights = jnp.where(is_empty, 0, jnp.exp2(sums - high[:, None]))
    total = weights.sum(1)
    if sinks is not None:
        total = total + jnp.exp2(sinks - high)
    mixed = jnp.where(is_empty[..., None], 0, mixed * weights[..., None]).sum(1)
    return mixed / jnp.where(total == 0, 1, total)[..., None]

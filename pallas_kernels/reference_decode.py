"""Decode attention in plain JAX: one query a row over its pages. The CPU path and the oracle.

A running softmax goes over blocks of pages (FlashAttention-2, Algorithm 1,
https://arxiv.org/abs/2307.08691; paging as in https://arxiv.org/abs/2309.06180, section 4) with a
trip count taken from the lengths, so the page table's width costs nothing. Rows run sorted by
length, and the loop narrows to a quarter of them, and a quarter again, as short ones end: cost
follows the live tokens, not rows times the longest. (Halves would follow closer, but every stage
adds a loop per layer, and so a second to each compile.) Each row still sums from its own page 0 in
blocks of one size, so its result depends on nothing but its own tokens.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from .backend import LOWEST, Scoring
from .reference_cache import ReferencePages

BLOCK_TOKENS = 128  # KV tokens a loop step reads per row; fewer costs loop overhead, more padding
MIN_ROWS = 2  # a one-row bfloat16 product runs as a scalar loop on the CPU, ten times slower
NARROWING = 4  # how many times fewer rows each stage of the loop runs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeWork:
    """What the rows of one step read, longest row first.

    Attributes:
      order: Row of each sorted place.
      inverse: Sorted place of each row.
      page_table: Of the sorted rows, padded to whole blocks with page 0.
      kv_lens: Of the sorted rows.
      stops: For each width in `widths`, the block at which the loop narrows to the next.
      widths: Rows that each stage of the loop runs.
    """

    order: Int32[Array, " rows"]
    inverse: Int32[Array, " rows"]
    page_table: Int32[Array, "rows columns"]
    kv_lens: Int32[Array, " rows"]
    stops: Int32[Array, " stages"]
    widths: tuple[int, ...] = field(metadata={"static": True})


def pages_per_block(page_size: int) -> int:
    """Pages that one loop step reads per row."""
    return max(1, BLOCK_TOKENS // page_size)


def whole_blocks(
    page_table: Int32[Array, "rows columns"], kv_lens: Int32[Array, " rows"], *, page_size: int
) -> Int32[Array, "rows whole_columns"]:
    """The page table padded to whole blocks; entries past a row's pages are page 0."""
    columns = page_table.shape[1]
    # Blocks are read whole, and what lies past a row's pages may be no page at all.
    is_used = jnp.arange(columns) * page_size < kv_lens[:, None]
    padding = -columns % pages_per_block(page_size)
    return jnp.pad(jnp.where(is_used, page_table, 0), ((0, 0), (0, padding)))


def decode_work(
    page_table: Int32[Array, "rows columns"], kv_lens: Int32[Array, " rows"], *, page_size: int
) -> DecodeWork:
    """Sorts the rows and finds where the loop narrows. Once a step, before the layers."""
    rows = page_table.shape[0]
    block = pages_per_block(page_size)
    # Counting who comes first sorts a few hundred rows as fast as a sort does, and compiles faster.
    row = jnp.arange(rows)
    is_longer = kv_lens[None, :] > kv_lens[:, None]
    is_tied_before = (kv_lens[None, :] == kv_lens[:, None]) & (row[None, :] < row[:, None])
    inverse = (is_longer | is_tied_before).sum(-1).astype(jnp.int32)
    order = jnp.zeros(rows, jnp.int32).at[inverse].set(row, unique_indices=True)
    sorted_lens = kv_lens[order]
    blocks = -(-sorted_lens // (block * page_size))
    widths = [rows]
    while widths[-1] // NARROWING >= MIN_ROWS:
        widths.append(widths[-1] // NARROWING)
    # A stage of w rows runs while more than the next stage's rows have blocks left.
    stops = [blocks[width] for width in widths[1:]] + [blocks[0]]
    return DecodeWork(
        order=order,
        inverse=inverse,
        page_table=whole_blocks(page_table[order], sorted_lens, page_size=page_size),
        kv_lens=sorted_lens,
        stops=jnp.stack(stops),
        widths=tuple(widths),
    )


def decode_attention(
    q: Float[Array, "rows q_heads head_dim"],
    kv_layer: ReferencePages,
    work: DecodeWork,
    scoring: Scoring,
    sinks: Float[Array, " q_heads"] | None,
) -> Float[Array, "rows q_heads head_dim"]:
    """Attends one query token per row over that row's pages, as AttentionBackend says.

    Row i reads its tokens [0, kv_lens[i]), or the last `window` of them; blocks before those are
    read and masked.
    """
    rows, q_heads, head_dim = q.shape
    dtype, width = kv_layer.k.dtype, kv_layer.k.shape[2]
    kv_heads = width // head_dim
    page_size, block = kv_layer.page_size, pages_per_block(kv_layer.page_size)
    tokens = block * page_size

    # Query heads against all kv heads at once, zero outside their own head's columns: one product
    # instead of kv_heads small ones, and no transpose of the pages.
    own = _own_columns(q_heads, kv_heads)
    spread = jnp.where(own[None, :, :, None], q[work.order][:, :, None] * scoring.scale, 0)
    spread = spread.astype(dtype).reshape(rows, q_heads, width)

    def read_block(
        live: int, index: Int32[Array, ""], carry: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        high, total, mixed = carry  # running maximum, sum of weights, weighted values
        pages = lax.dynamic_slice(work.page_table, (0, index * block), (live, block))
        k = kv_layer.k.at[pages].get(mode="promise_in_bounds").reshape(live, tokens, width)
        v = kv_layer.v.at[pages].get(mode="promise_in_bounds").reshape(live, tokens, width)
        position = index * tokens + jnp.arange(tokens)
        seen = position < work.kv_lens[:live, None]
        if scoring.window is not None:
            seen &= position >= work.kv_lens[:live, None] - scoring.window
        scores = _batched(spread[:live], k, contract=(2, 2))
        # Behind a barrier the softmax stays out of the product, which is faster on the CPU.
        scores = capped(lax.optimization_barrier(scores), scoring.softcap)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        new_high = jnp.maximum(high, scores.max(-1))
        weights = jnp.exp(scores - new_high[..., None])
        fade = jnp.exp(high - new_high)
        # Weights are 0 past the length, but 0 * NaN is NaN: the values are masked as well.
        v = jnp.where(seen[..., None], v, 0)
        mixed_block = lax.optimization_barrier(_batched(weights.astype(dtype), v, contract=(2, 1)))
        new_total = total * fade + _sum_in_halves(weights)
        return new_high, new_total, mixed * fade[..., None] + mixed_block

    carry = (
        *initial_softmax(sinks, (rows, q_heads)),
        jnp.zeros((rows, q_heads, width), jnp.float32),
    )
    done: list[tuple[jax.Array, ...]] = []  # the rows that ended, shortest first
    start: Int32[Array, ""] | int = 0
    for stage, live in enumerate(work.widths):
        done.append(tuple(part[live:] for part in carry))
        carry = lax.fori_loop(
            start,
            work.stops[stage],
            partial(read_block, live),
            tuple(part[:live] for part in carry),
        )
        start = work.stops[stage]
    _, total, mixed = (
        jnp.concatenate([part, *reversed(ended)]) for part, *ended in zip(carry, *done, strict=True)
    )
    gathered = mixed.reshape(rows, q_heads, kv_heads, head_dim)
    heads = jnp.concatenate(
        [
            gathered[:, head * (q_heads // kv_heads) : (head + 1) * (q_heads // kv_heads), head]
            for head in range(kv_heads)
        ],
        axis=1,
    )
    return (heads / jnp.where(total > 0, total, 1)[..., None])[work.inverse]


def initial_softmax(
    sinks: Float[Array, " q_heads"] | None, shape: tuple[int, int]
) -> tuple[Float[Array, "queries q_heads"], Float[Array, "queries q_heads"]]:
    """Running maximum and sum of weights before any token was read, of [queries, q_heads]."""
    if sinks is None:
        return jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)
    # A sink is a token that has a score and no value.
    return jnp.broadcast_to(sinks.astype(jnp.float32), shape), jnp.ones(shape, jnp.float32)


def capped(scores: Float[Array, "*shape"], softcap: float | None) -> Float[Array, "*shape"]:
    """Scores under a soft cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _own_columns(q_heads: int, kv_heads: int) -> Bool[Array, "q_heads kv_heads"]:
    """Which kv head each query head reads."""
    return jnp.arange(q_heads)[:, None] // (q_heads // kv_heads) == jnp.arange(kv_heads)


def _sum_in_halves(x: Float[Array, "rows q_heads tokens"]) -> Float[Array, "rows q_heads"]:
    """Sums each row's tokens in an order that the number of rows does not change.

    XLA splits the axis of a plain sum where there are few rows: the stages of the loop would differ
    in the last bit, and so would a row whose neighbours end sooner.
    """
    while (tokens := x.shape[-1]) > 1:
        half = -(-tokens // 2)
        x = x[..., :half] + jnp.pad(x[..., half:], ((0, 0), (0, 0), (0, 2 * half - tokens)))
    return x[..., 0]


def _batched(a: jax.Array, b: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    """A product per row, summed in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((0,), (0,)))
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )

"""Bytes that the GPU kernels move, from their plans.

What is read again soon, by another head or block of the same step, is counted where it is asked
for; most of that comes out of the cache of the chip.
"""

import math

from octavo.pallas_kernels.gpu_budget import MAX_GROUP, QUERIES, KernelPlan
from octavo.pallas_kernels.gpu_decode import stored_heads
from octavo.pallas_kernels.gpu_work import TILE_TOKENS

from .traffic import Traffic


def decode_row_traffic(
    plan: KernelPlan,
    *,
    kv_len: int,
    page_size: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    width: int,
    window: int | None = None,
    has_sinks: bool = False,
) -> Traffic:
    """What one decode row of kv_len > 0 tokens moves."""
    group = q_heads // kv_heads
    tokens = _tokens_read(plan.kv_tile, page_size, first_seen(kv_len, window), kv_len)
    used = min(plan.splits, _tiles(plan.kv_tile, first_seen(kv_len, window), kv_len))
    queries = kv_heads * plan.splits * MAX_GROUP * width * 2
    stored = kv_heads * stored_heads(group, width) * width
    if plan.splits == 1 and not has_sinks:
        results = stored * 2
    else:
        sums = kv_heads * plan.splits * MAX_GROUP * 4
        # What a split without tiles does not write is read all the same, and dropped.
        results = stored * 4 * (used + plan.splits) + 2 * sums + q_heads * width * 4
    seen = kv_len - first_seen(kv_len, window)
    least = 4 * head_dim * (seen * kv_heads + q_heads)
    kv_bytes = tokens * kv_heads * 4 * width
    return Traffic(kv_bytes=kv_bytes, other_bytes=queries + results, least_bytes=least)


def prefill_tile_traffic(
    plan: KernelPlan,
    *,
    first_position: int,
    page_size: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    width: int,
    window: int | None = None,
) -> Traffic:
    """What a full tile of queries moves: each of its blocks reads the KV of a kv head anew."""
    block_tokens = QUERIES // (q_heads // kv_heads)
    tokens = 0
    for skipped in range(0, TILE_TOKENS, block_tokens):
        first = first_position + skipped
        last = first + min(block_tokens, TILE_TOKENS - skipped)
        tokens += _tokens_read(plan.kv_tile, page_size, first_seen(first + 1, window), last)
    seen = first_position + TILE_TOKENS - first_seen(first_position + 1, window)
    others = 2 * TILE_TOKENS * q_heads * width * 2
    least = 4 * head_dim * (seen * kv_heads + TILE_TOKENS * q_heads)
    kv_bytes = tokens * kv_heads * 4 * width
    return Traffic(kv_bytes=kv_bytes, other_bytes=others, least_bytes=least)


def first_seen(kv_len: int, window: int | None) -> int:
    """First token that the last of kv_len tokens sees."""
    return 0 if window is None else max(kv_len - window, 0)


def _tiles(tile: int, seen_from: int, kv_len: int) -> int:
    return -(-kv_len // tile) - seen_from // tile


def _tokens_read(tile: int, page_size: int, seen_from: int, kv_len: int) -> int:
    """Whole tiles before and whole boxes after; what a last tile repeats comes from a cache."""
    box = math.gcd(page_size, tile)
    return -(-kv_len // box) * box - seen_from // tile * tile

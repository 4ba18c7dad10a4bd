"""Loads and stores that exist twice: as 32-bit words for Mosaic, by plain indexing elsewhere.

Two bfloat16 values share a 32-bit word of VMEM. Mosaic is fastest with views of the buffers as
words, loaded with a stride; the interpreter has no such views (`ref.bitcast`, `ref.reshape`), so
each function here has a twin for it. The twins are what the interpreter checks; the word forms are
compiled for every chip, and only a chip can run them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tpu_cache import LANES


def load_halves(
    buffers: Any, buffer: jax.Array, word: int, is_alive: jax.Array | None, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Low and high half of one word of every token of a block: each [block, lanes] bfloat16.

    Args:
      buffers: [buffers, block, words or more, 2, lanes].
      buffer: Which of them.
      word: Which word.
      is_alive: [block, lanes]; where it is not, zeros: never what a buffer held before. None: all.
      interpret: Use the twin.
    """
    if interpret:
        tokens = buffers[buffer, :, word]
        low, high = tokens[:, 0], tokens[:, 1]
        if is_alive is not None:
            zero = jnp.zeros((), tokens.dtype)
            low, high = jnp.where(is_alive, low, zero), jnp.where(is_alive, high, zero)
        return low, high
    _, block, words, _, lanes = buffers.shape
    view = buffers.bitcast(jnp.uint32).at[buffer].reshape(block * words, lanes)
    packed = _load_words(view, word, block, words)
    if is_alive is not None:  # one select for both halves
        packed = jnp.where(is_alive, packed, jnp.uint32(0))
    low = pltpu.bitcast(packed << 16, jnp.float32)
    high = pltpu.bitcast(packed & jnp.uint32(0xFFFF0000), jnp.float32)
    return low.astype(jnp.bfloat16), high.astype(jnp.bfloat16)


def load_queries(queries: Any, slot: jax.Array, head: int, *, interpret: bool) -> jax.Array:
    """The queries of a tile for one kv head: [rows, lanes] bfloat16.

    Rows are ordered by (pair of the group, token, half of the pair): `group_of_row` and
    `token_of_row` say which is which.

    Args:
      queries: [2, tile, kv_heads, pairs, 2, lanes].
      slot: Which of the two.
      head: Which kv head.
      interpret: Use the twin.
    """
    _, tile, heads, pairs, _, lanes = queries.shape
    if interpret:
        return jnp.swapaxes(queries[slot, :, head], 0, 1).reshape(2 * tile * pairs, lanes)
    view = queries.bitcast(jnp.uint32).at[slot].reshape(tile * heads * pairs, lanes)
    if tile == 1:
        words = _load_words(view, head * pairs, pairs, 1)
    else:
        parts = [_load_words(view, head * pairs + i, tile, heads * pairs) for i in range(pairs)]
        words = jnp.concatenate(parts, axis=0)
    return pltpu.bitcast(words, jnp.bfloat16)


def store_outputs(
    outputs: Any, slot: jax.Array, head: int, values: jax.Array, *, interpret: bool
) -> None:
    """Stores what a tile's queries of one kv head attended to, laid out as load_queries reads."""
    _, tile, heads, pairs, _, lanes = outputs.shape
    if interpret:
        by_pair = values.reshape(pairs, tile, 2, lanes)
        outputs[slot, :, head] = jnp.swapaxes(by_pair, 0, 1)
        return
    words = pltpu.bitcast(values, jnp.uint32)
    folds = lanes // LANES
    view = outputs.bitcast(jnp.uint32).at[slot].reshape(tile * heads * pairs * folds, LANES)
    parts, step, count = (1, 1, pairs) if tile == 1 else (pairs, heads * pairs, tile)
    for part in range(parts):
        for fold in range(folds):
            at = pl.ds((head * pairs + part) * folds + fold, count, step * folds)
            rows = slice(part * count, (part + 1) * count)
            view[at, :] = words[rows, fold * LANES : (fold + 1) * LANES]


def token_of_row(row: jax.Array, tile: int) -> jax.Array:
    """Token of the tile that a row of load_queries belongs to."""
    return (row >> 1) & (tile - 1)


def group_of_row(row: jax.Array, tile: int) -> jax.Array:
    """Query head, within its kv head's group, that a row of load_queries belongs to."""
    return 2 * (row >> tile.bit_length()) + (row & 1)


def _load_words(view: Any, first: int, count: int, step: int) -> jax.Array:
    """Rows first, first + step, ... of a view of words, 128 lanes at a time."""
    folds = view.shape[-1] // LANES
    view = view.reshape(view.shape[0] * folds, LANES)
    parts = [view[pl.ds(first * folds + fold, count, step * folds), :] for fold in range(folds)]
    return parts[0] if folds == 1 else jnp.concatenate(parts, axis=1)

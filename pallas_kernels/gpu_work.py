"""Work lists of the GPU kernels, built once per step: what each block reads and writes."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from .chunk_tokens import Segments

TILE_TOKENS = 64
TILE_FIELDS = ("tokens", "segment", "first_token", "first_position", "is_padding")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeWork:
    """The rows: blocks find their share of a row by themselves.

    Attributes:
      page_table: Pages of each row; entries past its length are never used.
      kv_lens: Tokens each row sees.
    """

    page_table: Int32[Array, "rows columns"]
    kv_lens: Int32[Array, " rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillWork:
    """Tiles of at most TILE_TOKENS tokens of one segment each, and of padding.

    Attributes:
      page_table: Pages of each segment; entries past its length are never used.
      tiles: For each tile TILE_FIELDS: how many tokens, 0 where the list has ended; their segment;
        the first in the chunk; its position in its request; and 1 where the tokens are padding.
    """

    page_table: Int32[Array, "segments columns"]
    tiles: Int32[Array, "tiles fields"]


def max_tiles(chunk: int, segments: int) -> int:
    """Tiles that a chunk may need: padding counts as a segment, each may end with a part tile."""
    return -(-chunk // TILE_TOKENS) + segments


def prefill_work(segments: Segments, chunk: int) -> PrefillWork:
    """Cuts a chunk of that many tokens into tiles."""
    q_lens, kv_lens = segments.q_lens, segments.kv_lens
    used = q_lens.sum()
    # Padding comes last, as a segment of its own.
    counts = jnp.append(q_lens, chunk - used)
    firsts = jnp.cumsum(counts) - counts
    tiles = -(-counts // TILE_TOKENS)
    tile_ends = jnp.cumsum(tiles)
    index = jnp.arange(max_tiles(chunk, q_lens.shape[0]))
    segment = (index[:, None] >= tile_ends).sum(-1)
    is_used = segment < counts.shape[0]
    segment = jnp.where(is_used, segment, 0)
    within = (index - (tile_ends - tiles)[segment]) * TILE_TOKENS
    is_padding = segment == q_lens.shape[0]
    fields = {
        "tokens": jnp.minimum(counts[segment] - within, TILE_TOKENS),
        "segment": jnp.where(is_padding, 0, segment),
        "first_token": firsts[segment] + within,
        "first_position": jnp.where(
            is_padding, 0, jnp.append(kv_lens - q_lens, 0)[segment] + within
        ),
        "is_padding": is_padding,
    }
    listed = jnp.where(is_used, jnp.stack([fields[name] for name in TILE_FIELDS]), 0).T
    return PrefillWork(segments.page_table, listed.astype(jnp.int32))

"""Work lists of the GPU kernels, built once per step: what each block reads and writes."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from .chunk_tokens import Segments
from .gpu_budget import QUERY_TILE

TILE_FIELDS = ("segment", "first_token", "tokens", "first_position", "kv_len")


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
    """Tiles of at most QUERY_TILE tokens of one segment each, and of padding.

    Attributes:
      page_table: Pages of each segment; entries past its length are never used.
      tiles: For each tile TILE_FIELDS: the segment; its first token in the chunk; how many tokens,
        0 where the list has ended; the position of the first in its request; and one past the last
        position, 0 where the tokens are padding.
    """

    page_table: Int32[Array, "segments columns"]
    tiles: Int32[Array, "tiles fields"]


def max_tiles(chunk: int, segments: int) -> int:
    """Tiles that a chunk may need: padding counts as a segment, each may end with a part tile."""
    return -(-chunk // QUERY_TILE) + segments


def prefill_work(segments: Segments, chunk: int) -> PrefillWork:
    """Cuts a chunk of that many tokens into tiles."""
    q_lens, kv_lens = segments.q_lens, segments.kv_lens
    used = q_lens.sum()
    # Padding comes last: a segment that sees nothing, so that its tiles write zeros.
    counts = jnp.append(q_lens, chunk - used)
    ends = jnp.append(kv_lens, 0)
    firsts = jnp.cumsum(counts) - counts
    tiles = -(-counts // QUERY_TILE)
    tile_ends = jnp.cumsum(tiles)
    index = jnp.arange(max_tiles(chunk, q_lens.shape[0]))
    segment = (index[:, None] >= tile_ends).sum(-1)
    is_used = segment < counts.shape[0]
    segment = jnp.where(is_used, segment, 0)
    within = (index - (tile_ends - tiles)[segment]) * QUERY_TILE
    tokens = jnp.clip(counts[segment] - within, 0, QUERY_TILE)
    is_padding = segment == q_lens.shape[0]
    first_position = (ends - counts)[segment] + within
    fields = (
        jnp.where(is_padding, 0, segment),
        firsts[segment] + within,
        tokens,
        jnp.where(is_padding, 0, first_position),
        jnp.where(is_padding, 0, first_position + tokens),
    )
    listed = jnp.where(is_used, jnp.stack(fields), 0).T
    return PrefillWork(segments.page_table, listed.astype(jnp.int32))

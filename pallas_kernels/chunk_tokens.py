"""The chunk of a step: which requests its prompt tokens belong to, and where each token stands."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Runs of the chunk: consecutive prompt tokens of one request each, packed in order.

    Attributes:
      page_table: Pages of each segment's request; entries past its length may hold anything.
      kv_lens: Tokens of the request up to and including the segment's last.
      q_lens: Tokens of the segment; 0: not used. Their sum is at most the chunk's tokens.
    """

    page_table: Int32[Array, "segments columns"]
    kv_lens: Int32[Array, " segments"]
    q_lens: Int32[Array, " segments"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkTokens:
    """Where each token of the chunk belongs.

    Attributes:
      segment_of: Segment of each token; the number of segments where the token is padding.
      position_of: Position of each token in its request; of no meaning where it is padding.
    """

    segment_of: Int32[Array, " chunk"]
    position_of: Int32[Array, " chunk"]


def chunk_tokens(segments: Segments, chunk: int) -> ChunkTokens:
    """Looks up every token of a chunk of that many tokens, padding included."""
    ends = jnp.cumsum(segments.q_lens)
    index = jnp.arange(chunk)
    segment_of = (index[:, None] >= ends).sum(-1)  # = segments past the last query
    used = jnp.where(segment_of < ends.shape[0], segment_of, 0)
    position_of = (segments.kv_lens - ends)[used] + index
    return ChunkTokens(segment_of.astype(jnp.int32), position_of.astype(jnp.int32))

"""What an attention backend is: the contract that the reference, TPU and GPU kernels keep.

Everything here is what one device does with its own kv heads. Shapes are static; work lists are
pytrees of the backend's own, built once per step on the device, before the layers that share them.

Promises of every backend, which tests hold all of them to:
- A row of length 0, and a token that is padding, gives zeros.
- What lies past a row's length, in places never written or in page-table entries past its pages,
  NaN included, never reaches its result; nor does what is in another row or segment.
- The order in which a row is summed depends on its own length and on the executable alone.
- Page 0 is never written, and every offset is right beyond 2^31 elements. Tokens are numbered with
  int32: pages times page_size, and behind them a step's padding, must stay below 2^31.
"""

import abc
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float, Int32

from .chunk_tokens import ChunkTokens, Segments

KVLayer = Any
"""Pages of one layer: a pytree whose leaves all have the page as leading axis and their kv heads in
KV_HEAD_AXIS. The rest of the layout is the backend's own; everyone else sees pages."""

KV_HEAD_AXIS = 2
"""Of every leaf of a KVLayer: devices that share the heads split this axis."""

Work = Any
"""A work list: a pytree of the backend's own."""

LOWEST = -1e30
"""Where a running maximum of scores starts: finite, so that nothing ever computes inf - inf."""


class UnsupportedShape(ValueError):
    """A backend cannot run a shape; the message names the field, its value and the bound."""


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """What one layer's pages hold on one device.

    Attributes:
      kv_heads: Key and value heads.
      head_dim: Width of one head.
      page_size: Tokens per page.
      dtype: Of keys and values, such as "bfloat16".
    """

    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The largest that one device will be asked for; budgets and refusals follow from it.

    Attributes:
      kv: The pages.
      q_heads: Query heads; a multiple of the kv heads.
      rows: Decode rows of the largest step.
      chunk: Prompt tokens of the largest step.
      segments: Most requests that share a chunk.
      pages_per_seq: Columns of the page table.
    """

    kv: KVShape
    q_heads: int
    rows: int
    chunk: int
    segments: int
    pages_per_seq: int


def heads_refusal(shape: AttentionShape, *, max_head_dim: int, max_group: int) -> str | None:
    """Why kernels with these bounds cannot run the heads of a shape; None: they can.

    Args:
      shape: What they are asked for.
      max_head_dim: The widest head.
      max_group: Most query heads per kv head.
    """
    head_dim, kv_heads, q_heads = shape.kv.head_dim, shape.kv.kv_heads, shape.q_heads
    if not 1 <= head_dim <= max_head_dim:
        return f"head_dim {head_dim}: must be in [1, {max_head_dim}]"
    if q_heads % kv_heads:
        return f"q_heads {q_heads}: must be a multiple of kv_heads {kv_heads}"
    if q_heads // kv_heads > max_group:
        return f"q_heads {q_heads}: at most {max_group} for each of {kv_heads} kv_heads"
    return None


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How queries and keys become scores. Static in compiled steps.

    Attributes:
      scale: Multiplies q k^T; usually head_dim ** -0.5.
      window: A token sees so many of the last tokens, its own included. None: all.
      softcap: Scores become softcap * tanh(scores / softcap), after the scale. None: as they are.
        Source: Gemma 2, https://arxiv.org/abs/2408.00118, section 2.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class AttentionBackend(abc.ABC):
    """One way to attend over pages. Frozen and hashable: it is static in compiled steps."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """As `--attention` calls it."""

    @abc.abstractmethod
    def refusal(self, shape: AttentionShape) -> str | None:
        """Why this backend cannot run a shape: field, value and bound; None: it can."""

    @abc.abstractmethod
    def allocate(self, shape: KVShape, num_pages: int) -> KVLayer:
        """Zeroed pages of one layer on one device. Page 0 is never written and stays zero."""

    @abc.abstractmethod
    def bytes_per_page(self, shape: KVShape) -> int:
        """Bytes that one page of one layer takes on one device, padding included."""

    @abc.abstractmethod
    def decode_work(
        self,
        page_table: Int32[Array, "rows columns"],
        kv_lens: Int32[Array, " rows"],
        *,
        page_size: int,
    ) -> Work:
        """The work of the decode rows.

        Args:
          page_table: Pages of each row; entries past its length may hold anything.
          kv_lens: Tokens each row sees, its own included; 0: padding.
          page_size: Tokens per page.
        """

    @abc.abstractmethod
    def prefill_work(self, segments: Segments, tokens: ChunkTokens, *, page_size: int) -> Work:
        """The work of a chunk.

        Args:
          segments: What the chunk holds.
          tokens: Where each of its tokens belongs.
          page_size: Tokens per page.
        """

    @abc.abstractmethod
    def write_kv(
        self,
        kv_layer: KVLayer,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slot_mapping: Int32[Array, " tokens"],
    ) -> KVLayer:
        """Stores each token's key and value, in place where kv_layer is donated.

        Args:
          kv_layer: The pages.
          k: Keys.
          v: Values.
          slot_mapping: page * page_size + offset of each token, all different; one past the pool is
            padding and dropped. Never negative.
        """

    @abc.abstractmethod
    def decode_attention(
        self,
        q: Float[Array, "rows q_heads head_dim"],
        kv_layer: KVLayer,
        work: Work,
        scoring: Scoring,
        sinks: Float[Array, " q_heads"] | None,
    ) -> Float[Array, "rows q_heads head_dim"]:
        """Attends one query token per row over that row's pages.

        Args:
          q: Queries, in float32 or the pages' dtype; head n reads kv head
            n // (q_heads / kv_heads).
          kv_layer: The pages, the rows' own tokens included.
          work: From decode_work.
          scoring: How queries and keys become scores.
          sinks: A score per head that takes part in the softmax and has no value. None: none.

        Returns:
          float32, or the pages' dtype.
        """

    @abc.abstractmethod
    def prefill_attention(
        self,
        q: Float[Array, "chunk q_heads head_dim"],
        kv_layer: KVLayer,
        work: Work,
        scoring: Scoring,
        sinks: Float[Array, " q_heads"] | None,
    ) -> Float[Array, "chunk q_heads head_dim"]:
        """Attends every chunk token over its request's tokens up to and including itself.

        Arguments as in decode_attention, but work is from prefill_work.
        """

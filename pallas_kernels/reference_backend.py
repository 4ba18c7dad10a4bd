"""The reference backend: plain JAX, every shape, every platform. The CPU path and the fallback."""

from dataclasses import dataclass

from jaxtyping import Array, Float, Int32

from . import reference_cache, reference_decode, reference_prefill
from .backend import AttentionBackend, AttentionShape, KVShape, Scoring
from .chunk_tokens import ChunkTokens, Segments
from .reference_cache import ReferencePages
from .reference_decode import DecodeWork
from .reference_prefill import PrefillWork


@dataclass(frozen=True)
class ReferenceBackend(AttentionBackend):
    """Attention in plain JAX."""

    @property
    def name(self) -> str:
        """As `--attention` calls it."""
        return "reference"

    def refusal(self, shape: AttentionShape) -> str | None:
        """It runs everything."""
        return None

    def allocate(self, shape: KVShape, num_pages: int) -> ReferencePages:
        """Zeroed pages of one layer."""
        return reference_cache.allocate(shape, num_pages)

    def bytes_per_page(self, shape: KVShape) -> int:
        """Bytes that one page of one layer takes."""
        return reference_cache.bytes_per_page(shape)

    def decode_work(
        self,
        page_table: Int32[Array, "rows columns"],
        kv_lens: Int32[Array, " rows"],
        *,
        page_size: int,
    ) -> DecodeWork:
        """Sorts the rows and finds where the loop narrows."""
        return reference_decode.decode_work(page_table, kv_lens, page_size=page_size)

    def prefill_work(
        self, segments: Segments, tokens: ChunkTokens, *, page_size: int
    ) -> PrefillWork:
        """Lists which tile reads which block."""
        return reference_prefill.prefill_work(segments, tokens, page_size=page_size)

    def write_kv(
        self,
        kv_layer: ReferencePages,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slot_mapping: Int32[Array, " tokens"],
    ) -> ReferencePages:
        """Stores each token's key and value at its place."""
        return reference_cache.write_kv(kv_layer, k, v, slot_mapping)

    def decode_attention(
        self,
        q: Float[Array, "rows q_heads head_dim"],
        kv_layer: ReferencePages,
        work: DecodeWork,
        scoring: Scoring,
        sinks: Float[Array, " q_heads"] | None,
    ) -> Float[Array, "rows q_heads head_dim"]:
        """Attends one query token per row; float32."""
        return reference_decode.decode_attention(q, kv_layer, work, scoring, sinks)

    def prefill_attention(
        self,
        q: Float[Array, "chunk q_heads head_dim"],
        kv_layer: ReferencePages,
        work: PrefillWork,
        scoring: Scoring,
        sinks: Float[Array, " q_heads"] | None,
    ) -> Float[Array, "chunk q_heads head_dim"]:
        """Attends every chunk token; float32."""
        return reference_prefill.prefill_attention(q, kv_layer, work, scoring, sinks)

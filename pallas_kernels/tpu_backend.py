"""The TPU backend: Mosaic kernels over pages, one set for every chip from v5 on."""

from dataclasses import dataclass
from typing import Any, Literal

from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Int32

from . import tpu_attention, tpu_budget, tpu_cache, tpu_work
from .backend import AttentionBackend, AttentionShape, KVShape, Scoring
from .chunk_tokens import ChunkTokens, Segments
from .tpu_cache import TpuPages
from .tpu_work import TpuWork


@dataclass(frozen=True)
class TpuBackend(AttentionBackend):
    """Attention by Pallas kernels for TPU.

    Attributes:
      interpret: "no": compiled by Mosaic. "yes": run by Pallas' interpreter, on any platform;
        memory that nobody wrote holds NaN. "races": the same, and two accesses to a place that
        nothing orders are an error.
      device_kind: Where it runs, as JAX calls it; empty: a chip that the kernels are made for.
    """

    interpret: Literal["no", "yes", "races"] = "no"
    device_kind: str = ""

    @property
    def name(self) -> str:
        """As `--attention` calls it."""
        return "tpu"

    def refusal(self, shape: AttentionShape) -> str | None:
        """What does not fit the kernels' chips, data types, VMEM or scalar memory."""
        return tpu_budget.refusal(self.device_kind, shape)

    def allocate(self, shape: KVShape, num_pages: int) -> TpuPages:
        """Zeroed pages of one layer."""
        return tpu_cache.allocate(shape, num_pages)

    def bytes_per_page(self, shape: KVShape) -> int:
        """Bytes that one page of one layer takes, padding included."""
        return tpu_cache.bytes_per_page(shape)

    def decode_work(
        self,
        page_table: Int32[Array, "rows columns"],
        kv_lens: Int32[Array, " rows"],
        *,
        page_size: int,
    ) -> TpuWork:
        """Puts the rows that see something first."""
        return tpu_work.decode_work(page_table, kv_lens)

    def prefill_work(self, segments: Segments, tokens: ChunkTokens, *, page_size: int) -> TpuWork:
        """Puts the segments that are used first, and what is padding last."""
        return tpu_work.prefill_work(segments, tokens.segment_of.shape[0])

    def write_kv(
        self,
        kv_layer: TpuPages,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slot_mapping: Int32[Array, " tokens"],
    ) -> TpuPages:
        """Stores each token's key and value, one DMA each."""
        return tpu_cache.write_kv(kv_layer, k, v, slot_mapping, interpret=self._interpret)

    def decode_attention(
        self,
        q: Float[Array, "rows q_heads head_dim"],
        kv_layer: TpuPages,
        work: TpuWork,
        scoring: Scoring,
        sinks: Float[Array, " q_heads"] | None,
    ) -> BFloat16[Array, "rows q_heads head_dim"]:
        """Attends one query token per row; bfloat16."""
        return tpu_attention.attend(
            q,
            kv_layer,
            work,
            scoring,
            sinks,
            item_tokens=1,
            interpret=self._interpret,
        )

    def prefill_attention(
        self,
        q: Float[Array, "chunk q_heads head_dim"],
        kv_layer: TpuPages,
        work: TpuWork,
        scoring: Scoring,
        sinks: Float[Array, " q_heads"] | None,
    ) -> BFloat16[Array, "chunk q_heads head_dim"]:
        """Attends every chunk token; bfloat16."""
        return tpu_attention.attend(
            q,
            kv_layer,
            work,
            scoring,
            sinks,
            item_tokens=max(q.shape[0], 2),
            interpret=self._interpret,
        )

    @property
    def _interpret(self) -> Any:
        """As pallas_call takes it."""
        if self.interpret == "no":
            return False
        return pltpu.InterpretParams(
            detect_races=self.interpret == "races", uninitialized_memory="nan"
        )

"""The GPU backend: Mosaic GPU kernels over pages, one source for A100, Hopper and B200."""

from dataclasses import dataclass
from typing import Any, Literal

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int32

from . import gpu_budget, gpu_cache, gpu_decode, gpu_prefill, gpu_work
from .backend import AttentionBackend, AttentionShape, KVShape, Scoring
from .chunk_tokens import ChunkTokens, Segments
from .gpu_budget import GpuChip
from .gpu_work import DecodeWork, PrefillWork

GpuPages = BFloat16[Array, "pages page_size kv_sides width"]


@dataclass(frozen=True)
class GpuBackend(AttentionBackend):
    """Attention by Pallas kernels for GPU.

    Attributes:
      chip: Where it runs: tiles, ring and splits follow from it.
      interpret: "no": compiled by Mosaic. "yes": run by Pallas' interpreter on the CPU; memory that
        nobody wrote holds NaN. "races": the same, and two accesses to a place that nothing orders
        are an error. Interpreted, pages are copied as on Hopper.
    """

    chip: GpuChip
    interpret: Literal["no", "yes", "races"] = "no"

    @property
    def name(self) -> str:
        """As `--attention` calls it."""
        return "gpu"

    def refusal(self, shape: AttentionShape) -> str | None:
        """What does not fit the kernels' data type, layouts or shared memory."""
        return gpu_budget.refusal(self.chip, shape)

    def allocate(self, shape: KVShape, num_pages: int) -> GpuPages:
        """Zeroed pages of one layer."""
        return gpu_cache.allocate(shape, num_pages)

    def bytes_per_page(self, shape: KVShape) -> int:
        """Bytes that one page of one layer takes, padding included."""
        return gpu_cache.bytes_per_page(shape)

    def decode_work(
        self,
        page_table: Int32[Array, "rows columns"],
        kv_lens: Int32[Array, " rows"],
        *,
        page_size: int,
    ) -> DecodeWork:
        """The rows as they are: blocks find their share of one by themselves."""
        return DecodeWork(page_table, kv_lens)

    def prefill_work(
        self, segments: Segments, tokens: ChunkTokens, *, page_size: int
    ) -> PrefillWork:
        """Cuts the chunk into tiles of one segment each."""
        return gpu_work.prefill_work(segments, tokens.segment_of.shape[0])

    def write_kv(
        self,
        kv_layer: GpuPages,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slot_mapping: Int32[Array, " tokens"],
    ) -> GpuPages:
        """Stores each token's key and value at its place."""
        return gpu_cache.write_kv(kv_layer, k, v, slot_mapping)

    def decode_attention(
        self,
        q: Float[Array, "rows q_heads head_dim"],
        kv_layer: GpuPages,
        work: DecodeWork,
        scoring: Scoring,
        sinks: Float[Array, " q_heads"] | None,
    ) -> Float[Array, "rows q_heads head_dim"]:
        """Attends one query token per row; bfloat16 or float32, whichever saves a pass."""
        _, page_size, sides, width = kv_layer.shape
        plan = gpu_budget.decode_plan(
            self.chip,
            rows=q.shape[0],
            kv_heads=sides // 2,
            width=width,
            max_tokens=work.page_table.shape[1] * page_size,
        )
        return gpu_decode.decode_attention(
            q,
            kv_layer,
            work,
            plan,
            scoring,
            sinks,
            has_tma=self.chip.has_tma,
            interpret=self._interpret,
        )

    def prefill_attention(
        self,
        q: Float[Array, "chunk q_heads head_dim"],
        kv_layer: GpuPages,
        work: PrefillWork,
        scoring: Scoring,
        sinks: Float[Array, " q_heads"] | None,
    ) -> Float[Array, "chunk q_heads head_dim"]:
        """Attends every chunk token; bfloat16."""
        return gpu_prefill.prefill_attention(
            q,
            kv_layer,
            work,
            gpu_budget.prefill_plan(self.chip, kv_layer.shape[3]),
            scoring,
            sinks,
            has_tma=self.chip.has_tma,
            interpret=self._interpret,
        )

    @property
    def _interpret(self) -> Any:
        """As plgpu.kernel takes it."""
        if self.interpret == "no":
            return False
        return plgpu.InterpretGPUParams(
            detect_races=self.interpret == "races", uninitialized_memory="nan"
        )


def gpu_backend(device: Any) -> GpuBackend:
    """The backend for a device, there or only compiled for; other makers' have capability 0."""
    major, _, minor = device.compute_capability.partition(".")
    is_cuda = major.isdecimal() and minor.isdecimal()
    return GpuBackend(GpuChip(10 * int(major) + int(minor) if is_cuda else 0, device.core_count))

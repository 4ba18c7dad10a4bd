"""EngineConfig: how much of everything one engine has; its compiled shapes follow from it."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from .scheduling_config import SchedulingConfig

DType = Literal["bfloat16", "float32"]
AttentionName = Literal["auto", "reference", "tpu", "gpu"]

# Fields that None leaves to the model or to the machine.
_OPTIONAL = (
    "max_num_batched_tokens",
    "max_model_len",
    "num_pages",
    "kv_cache_bytes",
    "device_memory_bytes",
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and sizes of one engine; every compiled shape derives from it.

    Sizes in bytes are of each device, where several share a model.

    Attributes:
      tensor_parallel_size: Devices that share each layer: heads, MLP and vocabulary are dealt to
        them (`models.dealing`).
      attention: What attends over the pages. "auto": the kernels of the platform where there are
        any for the model's shape, the plain-JAX reference else. "reference", "tpu", "gpu": that,
        or an error.
      dtype: Of weights, KV pages and matmul operands. Sums are kept in float32.
      max_num_seqs: Slots: requests that hold device state at once.
      prefill_chunk_tokens: Most prompt tokens in one step.
      max_num_batched_tokens: Most tokens in one step, decode rows and prompt chunk together.
        None: max_num_seqs + prefill_chunk_tokens.
      max_model_len: Most tokens of one request, prompt and output together. None: what the model
        was trained for, or what the pages hold if that is less.
      page_size: Tokens per page.
      num_pages: Pages of the KV pool, page 0 (kept zero) included. None: from kv_cache_bytes.
      kv_cache_bytes: Size of the KV pool of each device. None: from device_memory_bytes, or what
        the device has.
      device_memory_bytes: Memory of each device for parameters, programs, temporaries and the KV
        pool together. None: all that the device reports; the CPU reports none, and there the pools
        take at most a quarter of the memory that is free.
      host_kv_bytes: Host memory, for all devices together, for KV pages that had to leave them;
        only those of the prefix cache go there. 0: they are dropped. With `deterministic` only
        those of preempted requests go there; 0: no more requests are admitted than can grow to
        their ends.
      max_stop_ids: Stop ids per request, the model's end-of-sequence ids included.
      seed: Where seeds come from for requests that bring none.
      deterministic: The same prompt, parameters and seed give the same bits whatever runs beside:
        every step runs one executable, prompts are computed in whole chunks, and a preempted
        request keeps its KV. So every step costs as much as the largest, and chunks should be
        small.
      scheduling: Who is let in and who goes first; nothing compiled depends on it.
    """

    tensor_parallel_size: int = 1
    attention: AttentionName = "auto"
    dtype: DType = "bfloat16"
    max_num_seqs: int = 32
    prefill_chunk_tokens: int = 256
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    device_memory_bytes: int | None = None
    host_kv_bytes: int = 0
    max_stop_ids: int = 16
    seed: int = 0
    deterministic: bool = False
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and the bound."""
        if self.dtype not in get_args(DType):
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {get_args(DType)}")
        if self.attention not in get_args(AttentionName):
            names = get_args(AttentionName)
            raise ValueError(f"attention is {self.attention!r}; it must be one of {names}")
        bounds: dict[str, tuple[int, int]] = {
            "tensor_parallel_size": (1, 4096),
            "max_num_seqs": (1, 4096),
            "prefill_chunk_tokens": (1, 65_536),
            "max_num_batched_tokens": (2, 131_072),
            "max_model_len": (2, 2**24),
            "page_size": (1, 1024),
            "num_pages": (2, 2**24),
            "kv_cache_bytes": (1, 2**50),
            "device_memory_bytes": (1, 2**50),
            "host_kv_bytes": (0, 2**50),
            "max_stop_ids": (1, 256),
            "seed": (0, 2**64 - 1),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            # bool is an int to Python, and `True` pages are a mistake.
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number in [{low}, {high}]"
                )
        sizes = ("num_pages", "kv_cache_bytes", "device_memory_bytes")
        given = [f"{name} is {getattr(self, name)}" for name in sizes if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}; give at most one of them")
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic is {self.deterministic!r}; it must be True or False")
        if self.deterministic:
            self._check_deterministic()
        elif self.host_kv_bytes and not self.scheduling.prefix_cache:
            raise ValueError(
                f"host_kv_bytes is {self.host_kv_bytes} and prefix_cache is False; only pages of "
                "the prefix cache go to host memory"
            )
        if self.token_budget <= self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must exceed "
                f"max_num_seqs, {self.max_num_seqs}, or a full batch leaves no room for prompts"
            )

    def _check_deterministic(self) -> None:
        """A chunk is computed whole, in the one executable that there is."""
        chunk, batched = self.prefill_chunk_tokens, self.max_num_batched_tokens
        if chunk % self.page_size:
            raise ValueError(
                f"prefill_chunk_tokens is {chunk}; with deterministic it must be a multiple of "
                f"page_size, {self.page_size}"
            )
        if batched is not None and batched < self.max_num_seqs + chunk:
            raise ValueError(
                f"max_num_batched_tokens is {batched}; with deterministic it must be at least "
                f"{self.max_num_seqs + chunk}, max_num_seqs + prefill_chunk_tokens: no chunk is cut"
            )
        target_ms = self.scheduling.inter_token_target_ms
        if target_ms is not None:
            raise ValueError(
                f"inter_token_target_ms is {target_ms}; with deterministic it must be None: all "
                "steps run one executable, and no smaller chunk makes them shorter"
            )

    @property
    def token_budget(self) -> int:
        """Most tokens in one step: decode rows plus prompt tokens."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return self.max_num_seqs + self.prefill_chunk_tokens

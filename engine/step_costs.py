"""StepCosts: how long a step will take, from what was measured at start or planned. No JAX.

A step costs its base, which the weights decide, and what attention adds: a decode row reads the KV
of its whole context, a chunk token that of everything before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from .step_shapes import StepKey


@runtime_checkable
class PromptCosts(Protocol):
    """What it takes to have the KV of a prompt: StepCosts, or what corrects them."""

    def prefill_s(self, start: int, end: int) -> float:
        """Of computing tokens [start, end)."""

    def import_pages_s(self, num_pages: int) -> float:
        """Of bringing pages back from host memory."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds; measured on the device that runs the steps, or planned for one that is not there.

    Attributes:
      base_s: Of each executable, with next to no context.
      decode_kv_token_s: For each KV token that a decode row reads.
      chunk_kv_token_s: For each KV token that a token of a chunk reads.
      import_page_s: To bring one page of KV back from host memory.
      import_s: To bring any back at all.
    """

    base_s: Mapping[StepKey, float]
    decode_kv_token_s: float = 0.0
    chunk_kv_token_s: float = 0.0
    import_page_s: float = 0.0
    import_s: float = 0.0

    def step_s(self, key: StepKey, *, decode_kv_tokens: int = 0, chunk_kv_tokens: int = 0) -> float:
        """Of one step.

        Args:
          key: Its executable.
          decode_kv_tokens: Contexts of its decode rows, summed.
          chunk_kv_tokens: Contexts of its chunk tokens, summed.
        """
        return (
            self.base_s[key]
            + decode_kv_tokens * self.decode_kv_token_s
            + chunk_kv_tokens * self.chunk_kv_token_s
        )

    @cached_property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second, in the largest chunks, with next to no context and none beside.

        By the chunk's executable with the fewest rows.
        """
        key = max(self.base_s, key=lambda key: (key.chunk, -key.rows))
        return key.chunk / self.base_s[key]

    def prefill_s(self, start: int, end: int) -> float:
        """Of computing tokens [start, end) of one prompt at that pace, and reading their contexts.

        A part of a chunk costs its share.
        """
        num_tokens = end - start
        mean_context = (start + end) / 2
        return num_tokens * (1 / self.prefill_tokens_per_s + mean_context * self.chunk_kv_token_s)

    def import_pages_s(self, num_pages: int) -> float:
        """Of bringing pages back from host memory."""
        return self.import_s + num_pages * self.import_page_s if num_pages else 0.0


def chunk_kv_tokens(start: int, length: int) -> int:
    """Contexts, summed, of the chunk tokens [start, start + length) of one request."""
    return length * start + length * (length + 1) // 2

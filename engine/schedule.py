"""What the scheduler decides about: live requests, and the step that is next. No JAX."""

from dataclasses import dataclass, field

from .request import Request


@dataclass(eq=False, kw_only=True)
class RequestState:
    """A live request inside the engine. Mutable; touched by the engine thread alone.

    The engine reads step t after it dispatched step t + 1, so two counts differ by what is in
    flight: `num_sampled` counts tokens that dispatched steps will bring, `output_token_ids` holds
    those that were read.

    Attributes:
      request: What was asked for.
      max_tokens: Output tokens at most, the context limit included.
      stop_ids: Ids that end it: its own and, unless ignored, the model's end-of-sequence ids.
      seed: Of its random numbers. Picked when the engine takes it, if the request brings none.
      ordinal: How many requests the engine took before it. The one order of service: who waits,
        who is admitted and who is preempted follow it, never the clock.
      output_token_ids: Output ids read so far.
      num_computed_tokens: Tokens of prompt + output whose KV dispatched steps have written.
      num_sampled: Output tokens sampled by dispatched steps, read or not.
      prefill_end: Prefill ends when num_computed_tokens reaches this: the prompt's length, and
        after a preemption that plus the outputs read by then.
      slot: Its place in device state, None while it waits.
      generation: Grows with each slot insertion; tells late results of an earlier stay apart.
      page_ids: Its pages, in order.
      num_preemptions: How often it lost its slot.
      num_prompt_logprobs: Prompt log-probabilities handed out so far.
      admitted_s, first_token_s: See Timings.
    """

    request: Request
    max_tokens: int
    stop_ids: tuple[int, ...]
    seed: int = 0
    ordinal: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_sampled: int = 0
    prefill_end: int = 0
    slot: int | None = None
    generation: int = 0
    page_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of the prompt followed by the outputs read so far."""
        num_prompt_tokens = len(self.request.prompt_token_ids)
        outputs = self.output_token_ids[
            max(start - num_prompt_tokens, 0) : max(end - num_prompt_tokens, 0)
        ]
        return [*self.request.prompt_token_ids[start:end], *outputs]

    @property
    def in_flight(self) -> int:
        """Dispatched steps that carry a sample for it and were not read."""
        return self.num_sampled - len(self.output_token_ids)

    @property
    def is_prefilling(self) -> bool:
        """Its next tokens come from a prompt chunk, not from a decode row."""
        return self.num_computed_tokens < self.prefill_end

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV it can ever hold: the last token sampled is never fed back."""
        return len(self.request.prompt_token_ids) + self.max_tokens - 1


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """Tokens [start, start + length) of a request's prompt (and of its outputs, once preempted).

    Attributes:
      state: Whose.
      start: Tokens before the chunk whose KV is already in its pages.
      length: Tokens of the chunk.
      is_insert: The request got its slot in this step, so its slot row travels along.
      is_last: The chunk reaches prefill_end: its last token samples the next one.
    """

    state: RequestState
    start: int
    length: int
    is_insert: bool
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class PageEntry:
    """Column `column` of slot `slot`'s page table now holds `page`."""

    slot: int
    column: int
    page: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What one step does. Decode rows run one token each; chunks run their tokens.

    Attributes:
      decodes: Requests that run one decode row, in row order.
      chunks: Prompt chunks, in the order in which they are packed.
      page_entries: Page-table entries that changed since the last step.
      preempted: Requests that lost their slot to make room for this step.
    """

    decodes: tuple[RequestState, ...]
    chunks: tuple[PrefillChunk, ...]
    page_entries: tuple[PageEntry, ...]
    preempted: tuple[RequestState, ...] = ()

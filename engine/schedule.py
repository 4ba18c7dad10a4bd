"""What the scheduler decides about: live requests, and the step that is next. No JAX."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, override

from .events import Event
from .prefix_cache import CachedPage
from .request import Request
from .token_chain import TokenChain
from .token_masks import Mask

type Rank = tuple[float | int, ...]
"""Orders requests: the lower comes first."""


@dataclass(eq=False, kw_only=True, slots=True)
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
      reply_to: The request_id that outputs carry: the client's, whichever choice this is.
      choice: Which choice of its request it is.
      leader: Choice 0 of its request, unless it is that; it waits until the leader's prompt is
        computed.
      forks: The other choices, of choice 0.
      ids_mask: Ids that may come at all, as engine.token_masks has them; None: all.
      mask: Those that may come next; None: all, or its guide has not said yet.
      rule_entries: What the device's rule tables have yet to learn of it, since it got its slot.
        None: nothing.
      is_guided: Its mask changes with every token.
      is_plain: Its tokens need nothing but to be handed on.
      waits_for_mask: That of its next token is not known yet, so it cannot be sampled.
      chain: Its tokens as the prefix cache names them; None: it is not to be cached.
      ordinal: How many were queued before it; -1: it is in no queue yet.
      rank: Its place among those that run, set when it first gets a slot and kept from then on: the
        lower is served first, and whoever has the highest is preempted.
      output_token_ids: Output ids read so far.
      num_computed_tokens: Tokens of prompt + output whose KV dispatched steps have written.
      num_sampled: Output tokens sampled by dispatched steps, read or not.
      first_computed: num_computed_tokens when it got its slot: what came from the cache.
      num_committed_tokens: Those of them whose step was read; or that came from the cache.
      num_charged_tokens: Tokens of prompt + output that were computed before it was preempted, and
        charged to its tenant then.
      num_uncached_tokens: Tokens that it must compute once it gets a slot, as of when it began to
        wait.
      prefill_end: Prefill ends when num_computed_tokens reaches this: the prompt's length, and
        after a preemption that plus the outputs read by then.
      slot: Its place in device state, None while it waits.
      generation: Grows with each slot insertion, and when it ends; tells late results apart.
      page_ids: Its pages, in order.
      num_entered_pages: Those of them that were entered in the device's page table.
      is_inserted: Its slot row was sent to the device since it got its slot.
      copies: Its pages in host memory, by handle, while it is swapped out (engine.swap_reserve).
      held: What of its first pages is in the prefix cache.
      released: What it held there before it gave back its pages; some may have left since.
      publish_at: When num_committed_tokens reaches this, another page is full.
      num_cached_tokens: Prompt tokens that it did not compute when it first got its slot.
      num_preemptions: How often it lost its slot.
      num_prompt_logprobs: Prompt log-probabilities handed out so far.
      admitted_s, first_token_s: See Timings.
    """

    request: Request
    max_tokens: int
    stop_ids: tuple[int, ...]
    seed: int = 0
    reply_to: str = field(init=False)
    choice: int = 0
    leader: "RequestState | None" = None
    forks: "list[RequestState]" = field(default_factory=list)
    ids_mask: Mask | None = None
    mask: Mask | None = field(init=False)
    is_guided: bool = field(init=False)
    is_plain: bool = field(init=False)
    waits_for_mask: bool = field(init=False)
    rule_entries: "RuleEntries | None" = None
    chain: TokenChain | None = None
    ordinal: int = -1
    rank: Rank = ()
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    first_computed: int = 0
    num_committed_tokens: int = 0
    num_sampled: int = 0
    num_charged_tokens: int = 0
    num_uncached_tokens: int = 0
    prefill_end: int = 0
    slot: int | None = None
    generation: int = 0
    page_ids: list[int] = field(default_factory=list)
    num_entered_pages: int = 0
    is_inserted: bool = False
    copies: list[int] = field(default_factory=list)
    held: list[CachedPage] = field(default_factory=list)
    released: list[CachedPage] = field(default_factory=list)
    publish_at: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        """Works out, once, what steps ask of every row."""
        sampling = self.request.sampling
        self.reply_to = (self.leader or self).request.request_id
        self.is_guided = self.waits_for_mask = sampling.guide is not None
        self.is_plain = not (self.is_guided or sampling.logprobs)
        self.mask = None if self.is_guided else self.ids_mask

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of the prompt followed by the outputs read so far."""
        num_prompt_tokens = len(self.request.prompt_token_ids)
        outputs = self.output_token_ids[
            max(start - num_prompt_tokens, 0) : max(end - num_prompt_tokens, 0)
        ]
        return [*self.request.prompt_token_ids[start:end], *outputs]

    @property
    def is_masked(self) -> bool:
        """Whether only some ids may come."""
        return self.mask is not None or self.is_guided

    @property
    def in_flight(self) -> int:
        """Dispatched steps that carry a sample for it and were not read."""
        return self.num_sampled - len(self.output_token_ids)

    @property
    def is_prefilling(self) -> bool:
        """Its next tokens come from a prompt chunk, not from a decode row."""
        return self.num_computed_tokens < self.prefill_end

    @property
    def is_unread(self) -> bool:
        """Dispatched steps that it was part of were not read; of those whose KV it still has."""
        return self.in_flight > 0 or self.num_committed_tokens < self.num_computed_tokens

    @property
    def is_past_prompt(self) -> bool:
        """Its prompt is computed: what it computes next is a token that it sampled."""
        return self.num_computed_tokens >= len(self.request.prompt_token_ids)

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
      is_insert: Its slot row travels along: none did since the request got its slot.
      is_last: The chunk reaches prefill_end: its last token samples the next one.
      generation: The request's when the step was made.
    """

    state: RequestState
    start: int
    length: int
    is_insert: bool
    is_last: bool
    generation: int


class PageEntry(NamedTuple):
    """Column `column` of slot `slot`'s page table now holds `page`."""

    slot: int
    column: int
    page: int


class RuleEntry(NamedTuple):
    """One id in the device's rule tables, in the columns of engine.packing.

    Attributes:
      slot: Whose.
      column: Of the bias table; packing.COUNTED: of the counts.
      token_id: The id.
      value: Its count; or the bits of its bias.
    """

    slot: int
    column: int
    token_id: int
    value: int


class RuleEntries(Iterator[RuleEntry]):
    """Entries that are made when they are taken, but for one: so it is known whether any is left.

    What samples goes in the step that takes the last one, and no later: entries that come before
    the slot row does are forgotten with whoever had the slot.
    """

    def __init__(self, entries: Iterator[RuleEntry]) -> None:
        """Makes the first."""
        self._entries = entries
        self._ahead = next(entries, None)

    @override
    def __next__(self) -> RuleEntry:
        """The next one; raises StopIteration if none is left."""
        entry = self._ahead
        if entry is None:
            raise StopIteration
        self._ahead = next(self._entries, None)
        return entry

    @property
    def is_empty(self) -> bool:
        """None is left."""
        return self._ahead is None


class TransferKind(enum.Enum):
    """Between device and host memory."""

    EXPORT = "export"  # copy the page to the host, under the handle
    IMPORT = "import"  # copy what is under the handle into the page, and forget the handle
    DROP = "drop"  # forget the handle


class Transfer(NamedTuple):
    """One copy of one page. A handle is never used for two pages."""

    kind: TransferKind
    page: int
    handle: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What one step does. Decode rows run one token each; chunks run their tokens.

    Attributes:
      decodes: Requests that run one decode row, in row order.
      generations: Theirs when the step was made.
      chunks: Prompt chunks, in the order in which they are packed.
      inserts: Whose slot rows travel without a chunk of theirs: they go on with a decode row, in
        this step or a later one, or with a chunk in a later one.
      masked: Whose masks go up: guided ones that sample, and others with their slot rows.
      page_entries: Page-table entries that changed since the last step.
      rule_entries: What the rule tables learn.
      transfers: Copies that must be dispatched before the step, in this order.
      events: What was decided since the last step.
      decode_kv_tokens: Contexts of the decode rows, summed.
    """

    decodes: tuple[RequestState, ...]
    generations: tuple[int, ...] = ()
    chunks: tuple[PrefillChunk, ...]
    inserts: tuple[RequestState, ...] = ()
    masked: tuple[RequestState, ...] = ()
    page_entries: tuple[PageEntry, ...]
    rule_entries: tuple[RuleEntry, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    events: tuple[Event, ...] = ()
    decode_kv_tokens: int = 0

"""Requests and their results: plain picklable records that carry ids only. No JAX.

`Request` and `RequestOutput` are what crosses between a front end and the engine; they would cross
a process border unchanged. Text never does: tokenizers live on the front end's side.
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from .sampling_params import SamplingParams


class FinishReason(enum.Enum):
    """Why a request ended; the value is the word clients see."""

    STOP = "stop"  # an end-of-sequence or stop id was sampled, or the front end saw a stop string
    LENGTH = "length"  # max_tokens or the context limit was reached
    CANCELLED = "cancelled"  # the client went away or asked for it
    DEADLINE = "deadline"  # its deadline or its time to wait has passed, or cannot be kept
    GUIDE = "guide"  # its guide met a limit or left nothing to come; RequestOutput.error says which
    ERROR = "error"  # the engine could not go on with it; RequestOutput.error says why


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue.

    Attributes:
      request_id: Unique among live requests; printable.
      prompt_token_ids: At least one id.
      sampling: How to continue it.
      arrival_s: When the front end accepted it, on the monotonic clock that the engine is given.
      deadline_s: When it is worthless, on the same clock. None: never.
      queue_ttl_s: Seconds that it may wait for its first slot. None: what the engine allows.
      tenant: Whose it is. Bounds and shares are kept per tenant, and no tenant's prompt ever hits
        pages of another's.
      priority: The higher goes first, under the policy "priority".
      request_class: What kind it is, such as "chat"; a label for reports.
      ttft_target_s: When its first token is due after arrival. None: no target.
      tpot_target_s: Seconds that each further token may take. Under the policy "deadline" prompt
        chunks beside it shrink to keep that, where they can; else a label for reports. None: no
        target.
      cache_salt: Parts the prefix cache further: only prompts with the same salt share pages.
      reads_prefix_cache: Whether pages of earlier prompts may stand in for computing its own.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    deadline_s: float | None = None
    queue_ttl_s: float | None = None
    tenant: str = ""
    priority: int = 0
    request_class: str = ""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    cache_salt: str = ""
    reads_prefix_cache: bool = True


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a request stands in the queue when it enters.

    Attributes:
      num_queued: Choices that wait already.
      predicted_wait_s: How long it will wait for a slot, as far as the pace of the engine tells.
    """

    num_queued: int
    predicted_wait_s: float


@dataclass(frozen=True, kw_only=True)
class Timings:
    """When a request passed each point, in seconds on the engine's monotonic clock.

    Attributes:
      arrival_s: The front end accepted it.
      admitted_s: It got a slot for the first time; None if it never did.
      first_token_s: The engine read its first token; None if it never did.
      finished_s: It ended.
    """

    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    finished_s: float


class RequestOutput(NamedTuple):
    """What one step brought for one choice of a request. Deltas, never cumulative.

    A tuple, because one is made for every token.

    Attributes:
      request_id: Whose.
      token_ids: New output ids, oldest first; may be empty in the last one.
      choice: Which of the request's choices.
      logprobs: One for each of token_ids if asked for, else empty.
      prompt_logprobs: New prompt log-probabilities if asked for, in order; together they cover
        prompt tokens [1, prompt length), and all come before the first output id of choice 0.
      finish_reason: Set in the last output of a choice and only there.
      stop_token_id: The id that ended it, when finish_reason is STOP.
      error: What went wrong, when finish_reason is ERROR or GUIDE.
      num_cached_tokens: Prompt tokens whose KV was in the prefix cache, set in the last output.
      num_preemptions: How often it lost its slot, set in the last output.
      timings: Set in the last output, unless the engine broke down and nobody knows them.
      top_token_ids, top_logprobs: For each of token_ids the most likely ids, as many as
        SamplingParams.top_logprobs says, and their log-probabilities; one after the other.
      prompt_top_token_ids, prompt_top_logprobs: The same for each of prompt_logprobs.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    choice: int = 0
    logprobs: tuple[float, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    timings: Timings | None = None
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    prompt_top_token_ids: tuple[int, ...] = ()
    prompt_top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy an engine is, and what it did since it started.

    What waits, runs and ends is a choice: a request with n of them counts n times, also its prompt,
    whose cached tokens are counted with each too. So prompt_tokens_total - cached_tokens_total is
    what was computed, preemptions aside. (The usage of a reply counts the prompt once.)

    EngineThread fills in what admission knows (queued_tokens, predicted_wait_s, refused_total), and
    counts as queued what the engine has not seen yet.

    Attributes:
      num_queued: Choices that wait for a slot, preempted ones included.
      num_running: Choices that have a slot, or whose last token is on its way.
      num_usable_pages: Pages that requests can hold; page 0 is not one of them.
      num_free_pages: Those that nobody holds, be they empty or cached.
      num_cached_pages: Those that nobody holds and the prefix cache keeps until they are needed.
      num_host_pages: Pages that were moved to host memory.
      queued_tokens: Tokens that choices which wait have to compute: a prompt once for all of its
        choices, less what is known to be in the prefix cache.
      predicted_wait_s: How long a request that came now would wait for a slot.
      refused_total: Requests that were refused because of load, by the bound they would exceed.
      steps_total: Steps dispatched.
      preemptions_total: Times a choice lost its slot.
      prompt_tokens_total: Prompt tokens of choices that got a slot, when they first did.
      cached_tokens_total: Those of them whose KV was in the prefix cache then.
      output_tokens_total: Output tokens read.
      finished_total: Choices that ended, by reason.
      evicted_pages_total: Pages that left the prefix cache, by engine.prefix_cache.EvictionReason.
      evicted_age_s_total: Seconds since the last use of those pages, summed, likewise.
      exported_pages_total: Pages moved to host memory.
      imported_pages_total: Pages brought back from it.
      progress_s: When a step was last completed, or work arrived at an idle engine. With requests
        live and this long ago, the engine hangs.
      is_paused: It was told to pause: no step runs, and that is no fault.
      failed: A step failed; nothing runs any more.
    """

    num_queued: int
    num_running: int
    num_usable_pages: int
    num_free_pages: int
    num_cached_pages: int = 0
    num_host_pages: int = 0
    queued_tokens: int = 0
    predicted_wait_s: float = 0.0
    refused_total: dict[str, int] = field(default_factory=dict)
    steps_total: int
    preemptions_total: int
    prompt_tokens_total: int
    cached_tokens_total: int = 0
    output_tokens_total: int
    finished_total: dict[FinishReason, int]
    evicted_pages_total: dict[str, int] = field(default_factory=dict)
    evicted_age_s_total: dict[str, float] = field(default_factory=dict)
    exported_pages_total: int = 0
    imported_pages_total: int = 0
    progress_s: float
    is_paused: bool = False
    failed: bool

"""Router: which replica a request goes to. A pure function for the gateway to call. No JAX.

The one where its first token is predicted to come soonest. Tokens that a replica holds in its
prefix cache need not be computed there, so prompts that begin alike gather; but only as long as
nobody gets much more than the mean, as in consistent hashing with bounded loads
(https://arxiv.org/abs/1608.01350): a popular beginning is then computed on a second replica too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .router_memory import RouterMemory

MAX_REPORT_AGE_S = 3.0
"""A replica that was not heard of for longer gets no requests."""

MAX_OVER_MEAN = 1.2
"""What a replica may have been given lately, over the mean, to be given more."""


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """What a replica says of itself.

    Attributes:
      name: Its own; the same in all reports.
      at_s: When it said so, on the caller's clock.
      is_serving: Takes requests: not starting, draining, paused or failed.
      wait_s: Seconds that a request would wait for its first chunk if it came now.
      tokens_per_s: Prompt tokens that it computes in a second, above 0.
    """

    name: str
    at_s: float
    is_serving: bool
    wait_s: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class RoutedRequest:
    """What of a request decides where it goes.

    Attributes:
      num_prompt_tokens: Of its prompt.
      num_output_tokens: That it is expected to bring.
      keys: Of the prompt's full pages (engine.token_chain), at least the first of them.
      page_size: Tokens per page.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    keys: Sequence[bytes]
    page_size: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where a request goes; for RouterMemory.sent.

    Attributes:
      name: Of the replica.
      first_token_s: When its first token is predicted, from now on.
      num_cached_tokens: Prompt tokens that the replica is believed to hold.
      num_tokens: Those that it has to compute for the request: of the prompt, and the output.
    """

    name: str
    first_token_s: float
    num_cached_tokens: int
    num_tokens: int


def choose(
    request: RoutedRequest, replicas: Sequence[ReplicaReport], memory: RouterMemory, now_s: float
) -> Choice | None:
    """Where to send a request; None: nobody takes requests.

    Deterministic: of equals it is the one that was given least lately, then the lowest name.

    Args:
      request: What is known of it.
      replicas: The last report of each.
      memory: What was sent where; not changed.
      now_s: The time, on the clock of the reports.
    """
    candidates = [
        each for each in replicas if each.is_serving and now_s - each.at_s <= MAX_REPORT_AGE_S
    ]
    if not candidates:
        return None
    given = memory.given
    loads = [given.get(each.name, 0.0) for each in candidates]
    mean = (sum(loads) + request.num_prompt_tokens + request.num_output_tokens) / len(loads)
    most = max(MAX_OVER_MEAN * mean, min(loads))
    held = memory.held_pages(request.keys)
    best: tuple[float, float, str] | None = None
    num_cached = 0
    for replica, load in zip(candidates, loads, strict=True):
        if load > most:
            continue
        name = replica.name
        # The last token of a prompt is always computed.
        cached = min(held.get(name, 0) * request.page_size, request.num_prompt_tokens - 1)
        num_ahead = memory.unreported(name, replica.at_s) + request.num_prompt_tokens - cached
        key = (replica.wait_s + num_ahead / replica.tokens_per_s, load, name)
        if best is None or key < best:
            best, num_cached = key, cached
    assert best is not None, "whoever was given least is always eligible"
    return Choice(
        name=best[2],
        first_token_s=best[0],
        num_cached_tokens=num_cached,
        num_tokens=request.num_prompt_tokens - num_cached + request.num_output_tokens,
    )

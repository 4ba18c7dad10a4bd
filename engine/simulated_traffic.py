"""Traffic: made-up requests, the same for the same seed. No JAX.

A stream is one kind of request of one tenant. Each draws from its own random numbers, so what one
stream sends does not change with what others do.
"""

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .request import Request
from .sampling_params import SamplingParams

LONGEST_OVER_MEAN = 8  # exponential lengths are cut off here

_NUM_IDS = 1 << 15
_IDS = tuple(random.Random("ids").choices(range(_NUM_IDS), k=1 << 17))


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Requests of one kind.

    Attributes:
      tenant: Whose.
      request_class: What kind.
      rate_per_s: Requests per second.
      prompt_tokens, output_tokens: Means.
      has_tail: Lengths are exponentially distributed; else evenly from half to one and a half of
        the mean.
      is_even: Requests come in equal distances; else at random (Poisson).
      num_prefixes: Beginnings that its prompts share; 0: none.
      prefix_tokens: Of each such beginning, on top of prompt_tokens. One is chosen at random.
      priority, ttft_target_s, tpot_target_s, queue_ttl_s, deadline_after_s: See Request.
    """

    tenant: str = "t0"
    request_class: str = "chat"
    rate_per_s: float = 1.0
    prompt_tokens: int = 300
    output_tokens: int = 150
    has_tail: bool = True
    is_even: bool = False
    num_prefixes: int = 0
    prefix_tokens: int = 0
    priority: int = 0
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    queue_ttl_s: float | None = None
    deadline_after_s: float | None = None

    @property
    def name(self) -> str:
        """Tenant and class."""
        return f"{self.tenant}/{self.request_class}"


class Arrival(NamedTuple):
    """A request, and after how many outputs it ends."""

    request: Request
    num_output_tokens: int


def arrivals(streams: Sequence[Stream], seed: int, max_model_len: int) -> Iterator[Arrival]:
    """The requests of all streams in the order in which they come, without end."""
    flows = [_flow(stream, seed, index, max_model_len) for index, stream in enumerate(streams)]
    return heapq.merge(*flows, key=lambda arrival: arrival.request.arrival_s)


def _flow(stream: Stream, seed: int, index: int, max_model_len: int) -> Iterator[Arrival]:
    draw = random.Random(f"{seed} {stream.name}")
    prefixes = [_ids(draw, stream.prefix_tokens) for _ in range(stream.num_prefixes)]
    at_s, number = 0.0, 0
    # All outputs are long enough to be asked for, so one record serves all.
    sampling = SamplingParams()
    while True:
        at_s += 1 / stream.rate_per_s if stream.is_even else draw.expovariate(stream.rate_per_s)
        prefix = draw.choice(prefixes) if prefixes else ()
        unique = (index % _NUM_IDS, number // _NUM_IDS, number % _NUM_IDS)
        length = _length(draw, stream.prompt_tokens, stream.has_tail)
        prompt = (prefix + unique + _ids(draw, length - len(unique)))[: len(prefix) + length]
        prompt = prompt[: max_model_len // 2]
        most = max_model_len - len(prompt)
        yield Arrival(
            Request(
                request_id=f"{stream.name}/{number}",
                prompt_token_ids=prompt,
                sampling=sampling,
                arrival_s=at_s,
                deadline_s=(
                    None if stream.deadline_after_s is None else at_s + stream.deadline_after_s
                ),
                queue_ttl_s=stream.queue_ttl_s,
                tenant=stream.tenant,
                priority=stream.priority,
                request_class=stream.request_class,
                ttft_target_s=stream.ttft_target_s,
                tpot_target_s=stream.tpot_target_s,
            ),
            min(_length(draw, stream.output_tokens, stream.has_tail), most),
        )
        number += 1


def _length(draw: random.Random, mean: int, has_tail: bool) -> int:
    if has_tail:
        return 1 + int(min(draw.expovariate(1.0), LONGEST_OVER_MEAN) * (mean - 0.5))
    return max(1, round(mean * (0.5 + draw.random())))


def _ids(draw: random.Random, count: int) -> tuple[int, ...]:
    if count <= 0:
        return ()
    start = int(draw.random() * len(_IDS))
    ids = _IDS[start : start + count]
    return ids if len(ids) == count else ids + _IDS[: count - len(ids)]

"""What admission wants to know of requests under way: small records, one for each turn. No JAX."""

import enum
from collections.abc import Iterator
from typing import NamedTuple

from .schedule import RequestState, Schedule


class ProgressKind(enum.Enum):
    """What happened to a request."""

    EXPECTED = "expected"  # it began to wait; tokens: what it must compute, as the cache is now
    STARTED = "started"  # it got a slot; tokens: those that it need not compute
    COMPUTED = "computed"  # a step computes a part of its prompt; tokens: so many
    REQUEUED = "requeued"  # it lost its slot; tokens: its prompt and outputs


class Progress(NamedTuple):
    """One turn of one request."""

    kind: ProgressKind
    request_id: str
    num_tokens: int


def progress_to(kind: ProgressKind, state: RequestState, num_tokens: int) -> Progress:
    """One turn of this request."""
    return Progress(kind, state.request.request_id, num_tokens)


def progress_of(schedule: Schedule) -> Iterator[Progress]:
    """Who begins with a step, and what of prompts it computes."""
    for chunk in schedule.chunks:
        if chunk.is_insert:
            yield progress_to(ProgressKind.STARTED, chunk.state, chunk.start)
        yield progress_to(ProgressKind.COMPUTED, chunk.state, chunk.length)
    for state in schedule.inserts:
        yield progress_to(ProgressKind.STARTED, state, state.first_computed)
        if state.is_past_prompt:
            yield progress_to(ProgressKind.COMPUTED, state, 1)

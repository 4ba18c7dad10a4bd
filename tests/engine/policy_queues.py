"""Requests that wait: entered in a queue, and taken out in its order."""

from typing import Any

from octavo.configs.scheduling_config import PolicyName
from octavo.engine.policy import WaitingQueue
from octavo.engine.schedule import RequestState

from .fakes import request

POLICIES: tuple[PolicyName, ...] = ("fcfs", "priority", "fair", "deadline")


def state(request_id: str, prompt: int = 4, max_tokens: int = 4, **changes: Any) -> RequestState:
    return RequestState(
        request=request(request_id, [1] * prompt, **changes), max_tokens=max_tokens, stop_ids=()
    )


def fill(queue: WaitingQueue, *states: RequestState) -> None:
    """Enters requests in the order in which an engine would take them."""
    for ordinal, each in enumerate(states):
        each.ordinal = ordinal
        each.prefill_end = each.num_uncached_tokens = len(each.request.prompt_token_ids)
        queue.push(each)


def drain(queue: WaitingQueue, now_s: float = 0.0) -> list[str]:
    """Ids in the order in which they are next."""
    order: list[str] = []
    while (first := queue.first(now_s)) is not None:
        queue.remove(first)
        order.append(first.request.request_id)
    return order

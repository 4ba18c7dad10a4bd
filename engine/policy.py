"""Policies: in which order waiting requests get slots, and who must give one back. No JAX.

A policy is a queue. It sees every request come and go and is told what each computes; the scheduler
asks it who is next. Which policy runs is SchedulingConfig.policy; each has a file of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from ..configs.engine_config import EngineConfig
from ..configs.scheduling_config import PolicyName
from .policy_deadline import DeadlineQueue
from .policy_fair import FairQueue
from .policy_fcfs import FcfsQueue
from .policy_priority import PriorityQueue
from .schedule import Rank, RequestState
from .step_costs import PromptCosts


@runtime_checkable
class WaitingQueue(Protocol):
    """The waiting requests under one policy. All methods are deterministic."""

    keeps_count: bool
    """Whether `charge` is to be called."""

    def __len__(self) -> int:
        """Requests that wait."""

    def __iter__(self) -> Iterator[RequestState]:
        """All of them, in no particular order."""

    def push(self, state: RequestState) -> None:
        """A request waits: it is new, or has lost its slot."""

    def remove(self, state: RequestState) -> None:
        """It waits no more: it got a slot, or ended."""

    def first(self, now_s: float) -> RequestState | None:
        """Who is next. Nobody passes it, so it must not depend on who would fit."""

    def rank(self, state: RequestState) -> Rank:
        """Where a request that gets its first slot stands among those that run.

        The lowest is served first and is never preempted for others, so it always advances. A rank
        never changes: two that rank differently each time could preempt each other for ever.
        """

    def urgency(self, state: RequestState) -> Rank:
        """Whose prompt is computed first, of one that waits or runs; the lowest. It may change."""

    def gives_way(
        self, newcomer: RequestState, running: Sequence[RequestState]
    ) -> list[RequestState]:
        """Those that run, by rank, whose places who is next may take; the first to go first.

        Once they wait, the newcomer must still come before them.
        """

    def charge(self, state: RequestState, num_tokens: int) -> None:
        """A step computes tokens for a request, the first time that they are computed."""

    def depart(self, state: RequestState) -> None:
        """A request has ended."""

    def block(self, tenant: str) -> None:
        """A tenant has as many slots as it may have: its requests are passed over."""

    def unblock(self, tenant: str) -> None:
        """It has fewer again."""


def make_queue(engine_config: EngineConfig, costs: PromptCosts) -> WaitingQueue:
    """The empty queue of the policy that is configured."""
    config = engine_config.scheduling
    makers: dict[PolicyName, Callable[[], WaitingQueue]] = {
        "fcfs": FcfsQueue,
        "priority": lambda: PriorityQueue(config.priority_ageing_s),
        "fair": lambda: FairQueue(
            dict(config.tenant_weights), engine_config.max_num_seqs, engine_config.page_size
        ),
        "deadline": lambda: DeadlineQueue(config.default_ttft_target_s, costs),
    }
    return makers[config.policy]()

"""Nobody starves under overload that lasts; and the check says so once a way out is taken away."""

from typing import Any, get_args

import pytest

from octavo.bench.simulate_starvation import Scenario, scenario
from octavo.bench.simulation_setup import COSTS
from octavo.configs.scheduling_config import PolicyName
from octavo.engine import policy_deadline, policy_fair
from octavo.engine.policy_fair import FairQueue
from octavo.engine.policy_fcfs import FcfsQueue
from octavo.engine.policy_priority import PriorityQueue
from octavo.engine.schedule import Rank, RequestState

pytestmark = pytest.mark.usefixtures("types_unchecked")  # thousands of steps


@pytest.fixture(scope="module")
def small() -> Scenario:
    return scenario(COSTS["accelerator"], 1)


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_whom_the_policy_puts_last_ends_within_the_bound(small: Scenario, policy: PolicyName):
    """More than one turn, too, so somebody was measured who had to wait for a slot."""
    assert small.turn_s < small.longest_s(policy, 1) <= small.bound_s(policy)


def _last_come_first(queue: FcfsQueue, state: RequestState) -> Rank:
    return (-state.ordinal,)


def _without_ageing(queue: PriorityQueue, state: RequestState) -> Rank:
    return (-state.request.priority, state.ordinal)


def _ageing_half_as_fast(queue: PriorityQueue, state: RequestState) -> Rank:
    ageing_s = 2 * queue._ageing_s
    return (state.request.arrival_s - ageing_s * state.request.priority, state.ordinal)


def _without_count(queue: FairQueue, state: RequestState, num_tokens: int) -> None:
    pass


def _displaced_last(state: RequestState) -> Rank:
    return (state.num_preemptions > 0, state.ordinal)


WAYS_OUT: dict[str, tuple[PolicyName, Any, str, Any]] = {
    "who came first goes first": ("fcfs", FcfsQueue, "rank", _last_come_first),
    "waiting counts": ("priority", PriorityQueue, "rank", _without_ageing),
    "waiting counts as much as is said": ("priority", PriorityQueue, "rank", _ageing_half_as_fast),
    "service counts": ("fair", FairQueue, "charge", _without_count),
    "who gave way is the next of its tenant": (
        "fair",
        policy_fair,
        "_ran_before_and_order",
        _displaced_last,
    ),
    "late ones are due some time": ("deadline", policy_deadline, "LATE_TARGETS", 10**9),
    "late ones are due when it is said": ("deadline", policy_deadline, "LATE_TARGETS", 20),
}


@pytest.mark.parametrize("name", WAYS_OUT)
def test_without_a_way_out_the_bound_is_broken(
    small: Scenario, name: str, monkeypatch: pytest.MonkeyPatch
):
    """Breaks if runs are too short, or bounds so wide that they say nothing."""
    policy, owner, attribute, instead = WAYS_OUT[name]
    monkeypatch.setattr(owner, attribute, instead)
    assert small.longest_s(policy, 1) > small.bound_s(policy)

"""What holds for every policy, alone and in the scheduler."""

import random
from collections import Counter

import pytest

from octavo.configs.scheduling_config import PolicyName
from octavo.engine.policy import WaitingQueue, make_queue

from .fakes import planned_costs, small_config
from .policy_queues import POLICIES, drain, fill, state
from .test_scheduler import Driver, inserts


def _queue(policy: PolicyName) -> WaitingQueue:
    config = small_config(policy=policy)
    return make_queue(config, planned_costs(config))


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_requests_are_served_as_they_came(policy: PolicyName):
    """Breaks if ties are settled by anything but the order of arrival."""
    queue = _queue(policy)
    assert isinstance(queue, WaitingQueue)
    fill(queue, *(state(f"r{n}") for n in range(30)))
    assert len(queue) == len(list(queue)) == 30
    assert drain(queue) == [f"r{n}" for n in range(30)]
    assert len(queue) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_blocked_tenant_is_passed_over_and_comes_back_where_it_was(policy: PolicyName):
    queue = _queue(policy)
    states = [state(f"{tenant}{n}", tenant=tenant) for n in range(2) for tenant in "ab"]
    fill(queue, *states)
    queue.block("a")
    first = queue.first(0.0)
    assert first is not None
    assert first.request.request_id == "b0"
    assert len(queue) == 4, "those of blocked tenants wait as well"
    queue.block("b")
    assert queue.first(0.0) is None
    queue.remove(states[0])
    queue.unblock("b")
    queue.unblock("a")
    assert sorted(drain(queue)) == ["a1", "b0", "b1"]
    queue.unblock("c")  # never blocked


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_is_removed_is_gone(policy: PolicyName):
    queue = _queue(policy)
    states = [state(f"r{n}") for n in range(9)]
    fill(queue, *states)
    for each in states[::2]:
        queue.remove(each)
    assert drain(queue) == [f"r{n}" for n in range(1, 9, 2)]


@pytest.mark.parametrize("policy", ["fcfs", "deadline"])
def test_nobody_gives_way(policy: PolicyName):
    queue, running = _queue(policy), state("b", ttft_target_s=60.0)
    running.rank = queue.rank(running)
    assert not queue.gives_way(state("a", priority=9, ttft_target_s=1.0), [running])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_that_floods_its_bound_does_not_starve_another(policy: PolicyName):
    """Case 5.7: B comes behind a queue of A's, which may have one slot of two at a time."""
    config = small_config(policy=policy, max_num_seqs=2, max_tenant_running=1)
    driver = Driver(config, 40)
    driver.add(*(state(f"a{n}", tenant="a", max_tokens=10) for n in range(20)))
    driver.step()
    driver.add(state("b", tenant="b", max_tokens=2))
    schedule = driver.step()
    assert inserts(schedule) == ["b"], "a slot is free, and A has as many as it may"
    admitted: list[str] = []
    while driver.scheduler.live:
        admitted += inserts(driver.step())
        running = Counter(each.request.tenant for each in driver.scheduler.running)
        assert running["a"] <= 1
    assert len(admitted) == 19, "all of A's are served, one after the other"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everyone_in_bounded_time_though_pages_run_out(policy: PolicyName):
    """Watchdog of case 5.1: no order may leave anyone, or come to nothing while somebody waits."""
    rng = random.Random(1)
    config = small_config(
        policy=policy, max_num_seqs=3, priority_ageing_s=20.0, default_ttft_target_s=20.0
    )
    driver = Driver(config, 8)
    for n in range(60):
        prompt = rng.randint(1, 12)
        driver.add(
            state(
                f"r{n}",
                prompt,
                rng.randint(1, 12),
                tenant=rng.choice("ab"),
                priority=rng.randrange(3),
                ttft_target_s=rng.choice([None, 5.0, 50.0]),
            )
        )
        driver.step()
    while driver.scheduler.live:
        driver.step()
        assert driver.num_steps < 60 * 30

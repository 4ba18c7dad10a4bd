"""Priority, alone and in the scheduler: who gives way to whom, and that nobody starves."""

from typing import Any

import pytest

from octavo.engine.policy_priority import PriorityQueue

from .fakes import small_config
from .policy_queues import drain, fill, state
from .test_scheduler import Driver, ids, inserts


def test_priority_the_higher_first_and_waiting_counts():
    """With ageing of 10 s, 10 s of waiting weigh as much as one step of priority."""
    queue = PriorityQueue(10.0)
    fill(
        queue,
        state("low", arrival_s=0.0, priority=0),
        state("high", arrival_s=5.0, priority=1),
        state("late", arrival_s=11.0, priority=1),
        state("higher", arrival_s=19.0, priority=2),
        state("tie", arrival_s=-5.0, priority=0),
    )
    assert drain(queue) == ["high", "tie", "higher", "low", "late"]


@pytest.mark.parametrize(
    ("newcomer", "running", "may"),
    [
        ({"priority": 1}, {"priority": 0}, True),
        ({"priority": 0}, {"priority": 0}, False),
        ({"priority": 0}, {"priority": 1}, False),
        ({"priority": 1, "arrival_s": 9.9}, {"priority": 0}, True),
        ({"priority": 1, "arrival_s": 10.1}, {"priority": 0}, False),
        ({"priority": 0}, {"priority": 0, "arrival_s": 50.0}, False),
    ],
    ids=["higher", "equal", "lower", "not aged yet", "aged", "equal and earlier"],
)
def test_priority_strictly_higher_may_displace_unless_the_other_has_aged(
    newcomer: dict[str, Any], running: dict[str, Any], may: bool
):
    """Case 5.3: equal ones that displace each other do so in turn, for ever."""
    queue = PriorityQueue(10.0)
    runs = state("running", **running)
    runs.rank = queue.rank(runs)
    assert queue.gives_way(state("newcomer", **newcomer), [runs]) == [runs] * may


def _priority_driver(num_pages: int = 40) -> Driver:
    """Two slots; a step of priority weighs 1,000 steps."""
    config = small_config(policy="priority", max_num_seqs=2, priority_ageing_s=1000.0)
    return Driver(config, num_pages)


def test_a_high_priority_takes_a_slot_from_a_low_one_at_once():
    """Case 5.3: pages are plenty, slots are full; all of one tenant, as without a gateway.

    Breaks if a tenant that has all slots is passed over, or only pages are a reason to displace.
    """
    driver = _priority_driver()
    driver.add(state("low0", max_tokens=50), state("low1", max_tokens=50))
    driver.step()
    driver.step()
    driver.add(state("high", max_tokens=3, priority=1))
    schedule = driver.step()
    assert ids(driver.scheduler.preempted) == ["low1"], "the latest of the lowest gives way"
    assert inserts(schedule) == ["high"]
    driver.add(state("unstarted", max_tokens=3))
    admitted: list[str] = []
    while driver.scheduler.live:
        admitted += inserts(driver.step())
    assert admitted.index("low1") < admitted.index("unstarted"), "it was here first"
    assert driver.scheduler.preemptions_total == 1


def test_equal_priorities_never_displace_each_other():
    driver = _priority_driver()
    driver.add(*(state(f"r{n}", max_tokens=20, priority=1) for n in range(6)))
    admitted: list[str] = []
    while driver.scheduler.live:
        admitted += inserts(driver.step())
    assert admitted == [f"r{n}" for n in range(6)]
    assert driver.scheduler.preemptions_total == 0


def test_a_stream_of_high_priority_does_not_starve_a_low_one():
    """Case 5.3: 1,000 steps of newcomers that fill both slots; ageing bounds the wait.

    The low one is displaced until later ones stand behind it: here after 100 steps.
    """
    config = small_config(policy="priority", max_num_seqs=2, priority_ageing_s=100.0)
    driver = Driver(config, 40)
    low = state("low", max_tokens=5)
    driver.add(low)
    ended_at = None
    for step in range(1000):
        if len(driver.scheduler.waiting) < 4:
            arrival_s = float(step)
            driver.add(state(f"high{step}", priority=1, arrival_s=arrival_s, max_tokens=10))
        driver.step()
        if ended_at is None and "low" not in driver.scheduler.live:
            ended_at = step
    assert ended_at is not None
    assert ended_at <= 100 + 60, "later than its age allows"


def test_displacing_repeatedly_does_not_go_on_for_ever():
    """High ones come and go; whoever is displaced comes back and ends."""
    driver = _priority_driver(num_pages=12)
    lows = [state(f"low{n}", prompt=8, max_tokens=8) for n in range(3)]
    driver.add(*lows)
    for step in range(60):
        if step % 6 == 0:
            driver.add(state(f"high{step}", priority=1, arrival_s=float(step), max_tokens=2))
        driver.step()
    while driver.scheduler.live:
        driver.step()
    assert all(len(low.output_token_ids) == 8 for low in lows)


def test_nobody_gives_way_to_one_who_would_not_fit_anyway():
    """`high` needs more than `low` has: what the other holds stands before it in rank."""
    driver = _priority_driver(num_pages=12)
    driver.add(state("first", 24, 16, priority=5))
    driver.step()
    driver.add(state("low", 4, 30))
    for _ in range(6):
        driver.step()
    assert [each.request.request_id for each in driver.scheduler.running] == ["first", "low"]
    driver.add(state("high", 16, 4, priority=3, tenant="another"))
    driver.step()
    assert not driver.scheduler.preempted
    while driver.scheduler.live:
        driver.step()

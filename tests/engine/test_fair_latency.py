"""Under "fair" a tenant within its share waits neither for a slot nor behind another's prompt."""

from collections import Counter

import pytest

from octavo.engine.policy_fair import MAX_DISPLACED, FairQueue
from octavo.engine.schedule import RequestState
from octavo.engine.scheduler import KEPT_FOR_LOWEST

from .fakes import request, small_config
from .test_scheduler import Driver, chunks


def state(name: str, tenant: str, prompt: int = 4, max_tokens: int = 40) -> RequestState:
    return RequestState(
        request=request(name, [1] * prompt, tenant=tenant), max_tokens=max_tokens, stop_ids=()
    )


def _driver(policy: str = "fair", num_slots: int = 8) -> Driver:
    config = small_config(
        policy=policy, max_num_seqs=num_slots, prefill_chunk_tokens=64, page_size=16
    )
    return Driver(config, 4000)


def _running(driver: Driver) -> Counter[str]:
    return Counter(each.request.tenant for each in driver.scheduler.running)


def _flooded(policy: str = "fair", num_slots: int = 8) -> Driver:
    """A request of the victim runs, and the flooder's, served more, hold all other slots."""
    driver = _driver(policy, num_slots)
    driver.add(state("v0", "victim", max_tokens=200))
    driver.step()
    driver.add(*(state(f"f{n}", "flooder", 4 + n % 7, 200) for n in range(9 * num_slots)))
    for _ in range(num_slots):
        driver.step()
    assert _running(driver) == {"victim": 1, "flooder": num_slots - 1}, "a slot idles"
    return driver


@pytest.mark.parametrize("num_slots", [2, 8, 32, 128])
def test_whoever_was_served_less_does_not_wait_for_others_to_end(num_slots: int):
    """Breaks without it: the flooder's requests run for 200 steps."""
    driver = _flooded(num_slots=num_slots)
    driver.add(state("v1", "victim"))
    assert ("v1", 0, 4) in chunks(driver.step())
    assert _running(driver) == Counter({"victim": 2, "flooder": num_slots - 2})
    (gone,) = driver.scheduler.preempted
    assert gone.request.tenant == "flooder"


def test_first_come_first_served_takes_no_slot_away():
    driver = _flooded("fcfs")
    driver.add(state("v1", "victim"))
    driver.step()
    assert driver.scheduler.preemptions_total == 0


def test_who_loses_least_gives_way():
    """Breaks if any may: what is not in a full page is computed again."""
    driver = _flooded()
    for _ in range(40):
        driver.step()
    lost = {
        each.request.request_id: each.num_computed_tokens - 16 * len(each.held)
        for each in driver.scheduler.running
        if each.request.tenant == "flooder"
    }
    driver.add(state("v1", "victim"))
    driver.step()
    (gone,) = driver.scheduler.preempted
    assert lost[gone.request.request_id] == min(lost.values()) < max(lost.values())


def test_whoever_was_served_more_takes_no_slot_away():
    """Breaks if it may: the one that gave way would be next again, and nobody would run."""
    driver = _flooded()
    queue = driver.scheduler.waiting
    assert isinstance(queue, FairQueue)
    queue.charge(state("", "victim"), 100_000)
    driver.add(state("v1", "victim"))
    driver.step()
    assert driver.scheduler.preemptions_total == 0


def test_a_slot_that_was_taken_away_goes_to_whom_it_was_taken_for():
    """Breaks if whose turn it is is asked again: decode rows have been charged meanwhile."""
    driver = _driver()
    driver.add(*(state(f"v{n}", "victim", max_tokens=200) for n in range(6)))
    driver.step()
    driver.step()
    driver.add(*(state(f"f{n}", "flooder", max_tokens=200) for n in range(50)))
    for _ in range(4):
        driver.step()
    queue = driver.scheduler.waiting
    assert isinstance(queue, FairQueue)
    behind = queue._served["flooder"] - queue._served["victim"]
    queue._served["victim"] += behind - 3 * 10**6  # six rows of it decode, and two of the flooder's
    driver.add(state("new", "victim"))
    assert ("new", 0, 4) in chunks(driver.step())
    assert len(driver.scheduler.preempted) == 1


def test_two_with_long_queues_take_no_slots_from_each_other():
    """Breaks if they do: each would compute again and again what the other threw out."""
    driver = _driver()
    for n in range(100):
        driver.add(*(state(f"{tenant}{n}", tenant) for tenant in ("flooder", "other")))
    for _ in range(100):
        driver.step()
        assert sum(_running(driver).values()) + len(driver.scheduler.ending) >= 8, "a slot idles"
    assert driver.scheduler.preemptions_total == 0


def test_nobody_gives_way_for_ever():
    """Breaks if a request can lose its slot to each newcomer of others: it would never end."""
    driver = _flooded()
    for number in range(1, 400):
        driver.add(state(f"v{number}", "victim", max_tokens=2))
        for _ in range(3):
            driver.step()
        states = driver.scheduler.live.values()
        assert max(each.num_preemptions for each in states) <= MAX_DISPLACED
    assert driver.scheduler.preemptions_total > MAX_DISPLACED
    assert "f0" not in driver.scheduler.live, "it has ended"


def test_a_prompt_of_whoever_was_served_less_goes_ahead_of_one_under_way():
    """Breaks if prompts under way go by rank alone: `v1` would get nothing for three steps."""
    driver = _driver()
    driver.add(state("v0", "victim"))
    driver.step()
    driver.add(state("f", "flooder", prompt=250))
    driver.step()
    driver.add(state("v1", "victim", prompt=40))
    assert chunks(driver.step()) == [("v1", 0, 40), ("f", 64, 24)]


def test_a_prompt_under_way_advances_however_many_go_ahead():
    """Breaks without the part that is kept for the lowest rank: `f` would stand still.

    Of those that run it has not the lowest rank, but of those that prefill.
    """
    driver = _driver(num_slots=64)
    driver.add(*(state(f"t{n} 0", f"t{n}", max_tokens=200) for n in range(20)))
    for _ in range(4):
        driver.step()
    driver.add(state("f", "flooder", prompt=250))
    driver.step()
    for number in range(20):
        driver.add(state(f"t{number} 1", f"t{number}", prompt=64))
        before = driver.scheduler.live["f"].num_computed_tokens
        made = chunks(driver.step())
        if before >= 250:
            break
        assert made[0][0] == f"t{number} 1", "it goes ahead"
        advance = driver.scheduler.live["f"].num_computed_tokens - before
        assert advance >= min(64 // KEPT_FOR_LOWEST, 250 - before)
    assert number > 3

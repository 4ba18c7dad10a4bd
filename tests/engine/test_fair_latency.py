"""Under "fair" a tenant within its share waits neither for a slot nor behind another's prompt."""

from collections import Counter

from octavo.engine.policy_fair import SLOTS_PER_LOAN, FairQueue
from octavo.engine.schedule import RequestState
from octavo.engine.scheduler import KEPT_FOR_LOWEST

from .fakes import request, small_config
from .test_scheduler import Driver, chunks


def state(name: str, tenant: str, prompt: int = 4, max_tokens: int = 40) -> RequestState:
    return RequestState(
        request=request(name, [1] * prompt, tenant=tenant), max_tokens=max_tokens, stop_ids=()
    )


def _driver(policy: str = "fair", num_slots: int = SLOTS_PER_LOAN) -> Driver:
    config = small_config(
        policy=policy, max_num_seqs=num_slots, prefill_chunk_tokens=64, page_size=16
    )
    return Driver(config, 4000)


def _running(driver: Driver) -> Counter[str]:
    return Counter(each.request.tenant for each in driver.scheduler.running)


def _flooded(num_slots: int = SLOTS_PER_LOAN) -> Driver:
    """Some requests of the victim run, and the flooder's, served more, hold all other slots."""
    driver = _driver(num_slots=num_slots)
    num_slow = num_slots // 4
    driver.add(*(state(f"v{n}", "victim", max_tokens=200) for n in range(num_slow)))
    for _ in range(num_slow // 4):
        driver.step()
    driver.add(*(state(f"f{n}", "flooder", max_tokens=200) for n in range(3 * num_slots)))
    for _ in range(num_slots // 2):
        driver.step()
    assert _running(driver) == {"victim": num_slow, "flooder": num_slots - num_slow}, "one idles"
    return driver


def test_a_slot_that_is_lent_goes_to_whoever_has_none_waiting():
    """Breaks without it: the victim's next request would wait until one of the flooder's ends."""
    driver = _flooded()
    driver.add(state("new", "victim"))
    assert ("new", 0, 4) in chunks(driver.step())
    assert [each.request.request_id for each in driver.scheduler.preempted] == ["f23"]
    assert _running(driver) == {"victim": 9, "flooder": SLOTS_PER_LOAN - 9}


def test_only_the_last_slots_are_lent():
    """Breaks if all of the flooder's would give way: what they computed would be for nothing."""
    driver = _flooded()
    driver.add(*(state(f"new{n}", "victim", max_tokens=200) for n in range(3)))
    for _ in range(3):
        driver.step()
    assert _running(driver) == {"victim": 9, "flooder": SLOTS_PER_LOAN - 9}


def test_a_lent_slot_is_not_taken_back_by_whoever_was_served_more():
    """Breaks if any tenant may: the one that gave way would be next again, and nobody would run."""
    driver = _flooded()
    queue = driver.scheduler.waiting
    assert isinstance(queue, FairQueue)
    queue.charge(state("", "victim"), 100_000)
    driver.add(state("new", "victim"))
    driver.step()
    assert driver.scheduler.preemptions_total == 0


def test_who_gave_way_does_not_do_so_again_and_hides_nobody():
    """Breaks if a request can lose its slot to each newcomer of others: it would never end.

    Breaks too if only the highest rank can give way: that is one that did so before.
    """
    driver = _flooded(num_slots=4 * SLOTS_PER_LOAN)
    for number in range(1, 100):
        driver.add(state(f"new{number}", "victim", max_tokens=200))
        driver.step()
        if number <= 4:
            assert driver.scheduler.preemptions_total == number
        for _ in range(3):
            driver.step()
        states = driver.scheduler.live.values()
        assert max(each.num_preemptions for each in states) <= 1


def test_no_slot_is_lent_if_nobody_else_is_there_or_all_have_queues():
    """Breaks if it is kept for nobody: whoever runs would give way to one that has its share."""
    alone, both = _driver(), _driver()
    for driver, tenants in ((alone, ["flooder"]), (both, ["flooder", "other"])):
        for tenant in tenants:
            driver.add(*(state(f"{tenant}{n}", tenant, max_tokens=200) for n in range(100)))
        for _ in range(10):
            driver.step()
        assert sum(_running(driver).values()) == SLOTS_PER_LOAN
        driver.add(state("late", "third"))
        driver.step()
        assert driver.scheduler.preemptions_total == 0


def test_first_come_first_served_lends_none():
    driver = _driver("fcfs")
    driver.add(state("v0", "victim", max_tokens=200))
    driver.step()
    driver.add(*(state(f"f{n}", "flooder", max_tokens=200) for n in range(100)))
    for _ in range(10):
        driver.step()
    assert sum(_running(driver).values()) == SLOTS_PER_LOAN


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

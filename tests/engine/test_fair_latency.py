"""Under "fair" a tenant within its share waits neither for a slot nor behind another's prompt."""

from collections import Counter

from octavo.engine.policy_fair import SLOTS_PER_KEPT
from octavo.engine.schedule import RequestState
from octavo.engine.scheduler import KEPT_FOR_LOWEST

from .fakes import request, small_config
from .test_scheduler import Driver, chunks


def state(name: str, tenant: str, prompt: int = 4, max_tokens: int = 40) -> RequestState:
    return RequestState(
        request=request(name, [1] * prompt, tenant=tenant), max_tokens=max_tokens, stop_ids=()
    )


def _driver(policy: str = "fair", num_slots: int = SLOTS_PER_KEPT) -> Driver:
    config = small_config(
        policy=policy, max_num_seqs=num_slots, prefill_chunk_tokens=64, page_size=16
    )
    return Driver(config, 400)


def _running(driver: Driver) -> Counter[str]:
    return Counter(each.request.tenant for each in driver.scheduler.running)


def test_a_slot_is_kept_from_a_long_queue_for_whoever_has_none():
    """Breaks without it: the victim's next request would wait until one of the flooder's ends."""
    driver = _driver()
    driver.add(state("v0", "victim", max_tokens=200))
    driver.step()
    driver.add(*(state(f"f{n}", "flooder", max_tokens=200) for n in range(100)))
    for _ in range(10):
        driver.step()
    assert _running(driver) == {"victim": 1, "flooder": SLOTS_PER_KEPT - 2}
    driver.add(state("v1", "victim"))
    assert ("v1", 0, 4) in chunks(driver.step())


def test_no_slot_is_kept_if_nobody_else_is_there_or_all_have_queues():
    """Breaks if it is kept for nobody: a busy engine would never fill its slots."""
    alone, both = _driver(), _driver()
    for driver, tenants in ((alone, ["flooder"]), (both, ["flooder", "other"])):
        for tenant in tenants:
            driver.add(*(state(f"{tenant}{n}", tenant, max_tokens=200) for n in range(100)))
        for _ in range(10):
            driver.step()
        assert sum(_running(driver).values()) == SLOTS_PER_KEPT


def test_first_come_first_served_keeps_none():
    driver = _driver("fcfs")
    driver.add(state("v0", "victim", max_tokens=200))
    driver.step()
    driver.add(*(state(f"f{n}", "flooder", max_tokens=200) for n in range(100)))
    for _ in range(10):
        driver.step()
    assert sum(_running(driver).values()) == SLOTS_PER_KEPT


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

"""What a request published is forgotten when its logits turn out broken, wherever it is by then.

Steps are read one behind, so a request may have lost its slot, or need no further step, when the
fault shows. Each of these fails if only what it holds at that moment is forgotten.
"""

from collections.abc import Callable

import pytest

from octavo.engine.prefix_cache import EvictionReason
from octavo.engine.schedule import RequestState

from .fakes import request, small_config
from .test_scheduler import Driver

PROMPT = tuple(range(1, 19))  # four full pages, and half of one


def _driver(*, deterministic: bool, max_host_pages: int = 40) -> Driver:
    config = small_config(policy="priority", deterministic=deterministic, max_num_seqs=1)
    return Driver(config, 20, max_host_pages=max_host_pages)


def _request(name: str, priority: int, max_tokens: int) -> RequestState:
    one = request(name, PROMPT if name == "broken" else (30, 31), priority=priority)
    return RequestState(request=one, max_tokens=max_tokens, stop_ids=())


def _displace(driver: Driver) -> RequestState:
    """`broken` publishes its prompt and loses its slot."""
    driver.add(broken := _request("broken", 0, 9))
    for _ in range(5):
        driver.step()
    assert len(broken.held) == 4
    driver.add(_request("urgent", 9, 3))
    driver.step()
    assert broken.slot is None
    assert len(driver.scheduler.memory.cache) == 4, "what it published stays, for all we know yet"
    return broken


def running(driver: Driver) -> RequestState:
    driver.add(broken := _request("broken", 0, 9))
    for _ in range(5):
        driver.step()
    assert broken.slot is not None
    return broken


def ending(driver: Driver) -> RequestState:
    """Its last step is dispatched, and all that it can publish is published."""
    driver.add(broken := _request("broken", 0, 2))
    for _ in range(5):
        driver.step()
        if broken.num_sampled == 2:
            break
    driver.dispatch()
    assert broken in driver.scheduler.ending
    return broken


def preempted(driver: Driver) -> RequestState:
    return _displace(driver)


def back(driver: Driver) -> RequestState:
    """It has its slot again, and read nothing of the cache or not all of it."""
    broken = _displace(driver)
    for _ in range(9):
        driver.step()
        if broken.slot is not None:
            return broken
    raise AssertionError("it does not come back")


def preempted_again(driver: Driver) -> RequestState:
    broken = back(driver)
    driver.add(_request("urgent too", 9, 3))
    driver.step()
    assert broken.slot is None
    return broken


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("get_there", [running, ending, preempted, back, preempted_again])
def test_what_it_published_is_forgotten(
    get_there: Callable[[Driver], RequestState], deterministic: bool
) -> None:
    driver = _driver(deterministic=deterministic)
    broken = get_there(driver)
    memory = driver.scheduler.memory
    assert len(memory.cache) >= 4
    driver.scheduler.remove(broken, 0.0, is_broken=True)
    driver.scheduler.check()
    assert not any(node.ids in _pages(broken) for node in memory.cache)
    assert memory.cache.evicted[EvictionReason.BROKEN] >= 4
    driver.add(again := _request("broken", 0, 1))
    for _ in range(20):
        driver.step()
    assert again.admitted_s is not None
    assert again.num_cached_tokens == 0


def _pages(state: RequestState) -> set[bytes]:
    assert state.released
    return {node.ids for node in state.released}


def test_what_went_to_host_memory_is_forgotten() -> None:
    """Its pages were needed after it lost its slot."""
    driver = _driver(deterministic=False)
    broken = _displace(driver)
    memory = driver.scheduler.memory
    filler = _request("filler", 0, 1)
    while memory.num_available:
        memory.grow(filler, 0.0)
    memory.release(filler, 0.0)
    assert memory.cache.num_host_pages == 4
    driver.scheduler.remove(broken, 0.0, is_broken=True)
    assert len(memory.cache) == memory.num_host_pages == 0
    driver.scheduler.check()


def test_what_others_hold_stays() -> None:
    """They have computed what follows, and end by themselves if that is broken too."""
    config = small_config(max_num_seqs=2)
    driver = Driver(config, 30)
    driver.add(first := _request("broken", 0, 9))
    for _ in range(5):
        driver.step()
    second = _request("second", 0, 9)
    second.request = request("second", (*PROMPT[:9], 30))
    driver.add(second)
    driver.step()
    assert second.num_cached_tokens == 8
    driver.scheduler.remove(first, 0.0, is_broken=True)
    assert len(driver.scheduler.memory.cache) == 2
    driver.scheduler.check()


def test_what_left_the_cache_meanwhile_is_passed_over() -> None:
    """Or nothing before it would be forgotten."""
    driver = _driver(deterministic=False, max_host_pages=0)
    broken = _displace(driver)
    memory = driver.scheduler.memory
    filler = _request("filler", 0, 1)
    for _ in range(memory.pool.num_free + 1):  # one more than there is without the last of its four
        memory.grow(filler, 0.0)
    assert len(memory.cache) == 3
    memory.release(filler, 0.0)
    driver.scheduler.remove(broken, 0.0, is_broken=True)
    assert len(memory.cache) == 0
    driver.scheduler.check()

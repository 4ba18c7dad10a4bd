"""Fairness, alone and in the scheduler: tenants share tokens by weight, and no slot idles."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from octavo.engine import policy_fair
from octavo.engine.keyed_queue import MAX_STALE_ENTRIES
from octavo.engine.policy_fair import FairQueue
from octavo.engine.schedule import RequestState, Schedule

from .fakes import small_config
from .policy_queues import drain, fill, state
from .test_scheduler import Driver


def _serve(
    queue: FairQueue, demand: dict[str, int], num_rounds: int, tokens: int = 10
) -> Counter[str]:
    """Serves one request at a time, each `tokens` long; tenants ask again at once."""
    served: Counter[str] = Counter()
    ordinals = iter(range(10**9))
    for tenant, backlog in demand.items():
        for _ in range(backlog):
            _ask(queue, tenant, ordinals)
    for _ in range(num_rounds):
        first = queue.first(0.0)
        assert first is not None, "somebody waits and nobody is next: not work-conserving"
        queue.remove(first)
        queue.charge(first, tokens)
        served[first.request.tenant] += tokens
        _ask(queue, first.request.tenant, ordinals)
        queue.depart(first)
    return served


def _ask(queue: FairQueue, tenant: str, ordinals: Iterator[int]) -> None:
    asked = state("r", tenant=tenant)
    asked.ordinal = next(ordinals)
    queue.push(asked)


def test_fair_equal_shares_whatever_the_backlog():
    """One tenant floods tenfold."""
    served = _serve(FairQueue({}, 4, 16), {"flood": 100, "victim": 1}, 1000)
    assert abs(served["flood"] - served["victim"]) <= 10


def test_fair_weighted_shares():
    served = _serve(FairQueue({"heavy": 3.0}, 4, 16), {"heavy": 5, "light": 5}, 4000)
    assert abs(served["heavy"] - 3 * served["light"]) <= 40


def test_fair_shares_are_of_tokens_not_of_requests():
    """A tenant of requests ten times as long gets a tenth as many."""
    queue = FairQueue({}, 4, 16)
    ordinals = iter(range(10**9))
    served: Counter[str] = Counter()
    for tenant in ("long", "short"):
        for _ in range(3):
            _ask(queue, tenant, ordinals)
    for _ in range(1100):
        first = queue.first(0.0)
        assert first is not None
        tenant = first.request.tenant
        queue.remove(first)
        queue.charge(first, 100 if tenant == "long" else 10)
        served[tenant] += 1
        _ask(queue, tenant, ordinals)
        queue.depart(first)
    assert served["long"] == pytest.approx(100, abs=1)


def test_fair_work_goes_on_when_only_one_tenant_has_any():
    """No slot stays empty to wait for those who were served less."""
    queue = FairQueue({}, 4, 16)
    fill(queue, *(state(f"a{n}", tenant="a") for n in range(9)))
    assert len(drain(queue)) == 9


def test_fair_a_pause_saves_nothing_up():
    """Breaks if a tenant that was away may catch up: it would have the engine for itself."""
    queue = FairQueue({}, 4, 16)
    _serve(queue, {"busy": 2, "pauses": 1}, 100)
    for waits in list(queue):
        if waits.request.tenant == "pauses":
            queue.remove(waits)
            queue.depart(waits)
    ordinals = iter(range(10**9, 10**10))
    for _ in range(500):
        first = queue.first(0.0)
        assert first is not None
        queue.remove(first)
        queue.charge(first, 10)
        _ask(queue, "busy", ordinals)
        queue.depart(first)
    for _ in range(200):
        _ask(queue, "pauses", ordinals)
    order: list[str] = []
    for _ in range(100):
        first = queue.first(0.0)
        assert first is not None
        queue.remove(first)
        queue.charge(first, 10)
        _ask(queue, first.request.tenant, ordinals)
        queue.depart(first)
        order.append(first.request.tenant)
    assert abs(order.count("busy") - order.count("pauses")) <= 2


def test_fair_leaving_and_coming_back_does_not_wash_off_what_was_served():
    """Breaks if a tenant starts anew each time that it has nothing live."""
    queue = FairQueue({}, 4, 16)
    ordinals = iter(range(10**9))
    _ask(queue, "other", ordinals)
    served: Counter[str] = Counter()
    _ask(queue, "washes", ordinals)
    for _ in range(200):
        first = queue.first(0.0)
        assert first is not None
        tenant = first.request.tenant
        queue.remove(first)
        queue.charge(first, 10)
        served[tenant] += 10
        queue.depart(first)  # nothing of it is live any more
        _ask(queue, tenant, ordinals)
    assert abs(served["other"] - served["washes"]) <= 20


def test_fair_a_preempted_request_comes_before_its_tenants_others():
    queue = FairQueue({}, 4, 16)
    fresh, again = state("fresh"), state("again")
    fill(queue, fresh)
    again.ordinal, again.num_preemptions = 7, 1
    queue._num_live[""] += 1
    queue.push(again)
    assert drain(queue) == ["again", "fresh"]


def test_fair_the_next_one_is_found_without_looking_at_all_tenants():
    """Against a search through all. Breaks if an order of tenants is not kept up to date."""

    def search() -> RequestState | None:
        firsts = [q.first() for name, q in queue._queues.items() if name not in queue._blocked]
        return min((one for one in firsts if one), key=queue.urgency, default=None)

    for seed in range(60):
        rng = random.Random(seed)
        queue, ordinals = FairQueue({"a": 2.0}, 4, 16), iter(range(10**9))
        waiting: list[RequestState] = []
        running: list[RequestState] = []
        for _ in range(300):
            what, tenant = rng.random(), rng.choice("abcdefgh")
            first = queue.first(0.0)
            if what < 0.35:
                new = state("r", tenant=tenant)
                new.ordinal = next(ordinals)
                queue.push(new)
                waiting.append(new)
            elif what < 0.55 and first is not None:
                queue.remove(first)
                waiting.remove(first)
                running.append(first)
            elif what < 0.7 and running:
                queue.charge(rng.choice(running), rng.choice([0, 1, 1, 10]))
            elif what < 0.76 and running:
                back = running.pop(rng.randrange(len(running)))
                back.num_preemptions += 1
                queue.push(back)
                waiting.append(back)
            elif what < 0.82 and running:
                queue.depart(running.pop(rng.randrange(len(running))))
            elif what < 0.86 and waiting:
                gone = waiting.pop(rng.randrange(len(waiting)))
                queue.remove(gone)
                queue.depart(gone)
            elif what < 0.93:
                queue.block(tenant)
            else:
                queue.unblock(tenant)
            assert queue.first(0.0) is search()


def test_fair_memory_is_bounded_for_a_million_tenants(monkeypatch: pytest.MonkeyPatch):
    """Each comes once, is served and goes; scaled down, with the bound scaled as well.

    Breaks if a counter is kept for everybody who ever came.
    """
    monkeypatch.setattr(policy_fair, "MAX_IDLE_TENANTS", 64)
    queue = FairQueue({}, 4, 16)
    rng = random.Random(0)
    for number in range(20_000):
        passing = state("r", tenant=f"t{number}")
        passing.ordinal = number
        queue.push(passing)
        queue.charge(passing, rng.randrange(1, 100))
        queue.remove(passing)
        queue.depart(passing)
        assert len(queue._served) <= 64 + 2
        assert len(queue._num_live) == len(queue._queues) == len(queue._blocked) == 0
        assert len(queue._entered) == 0
        assert len(queue._heap) <= MAX_STALE_ENTRIES


def test_fair_in_the_scheduler_shares_steps_and_never_idles():
    """Two tenants, one with a tenfold queue: tokens within a request's length of each other."""
    config = small_config(policy="fair", max_num_seqs=2)
    driver = Driver(config, 60)
    for n in range(100):
        driver.add(state(f"flood{n}", tenant="flood", max_tokens=8))
        if n % 10 == 0:
            driver.add(state(f"victim{n}", tenant="victim", max_tokens=8))
    served: Counter[str] = Counter()
    while any(each.request.tenant == "victim" for each in driver.scheduler.live.values()):
        schedule: Schedule = driver.step()
        for row in schedule.decodes:
            served[row.request.tenant] += 1
        for chunk in schedule.chunks:
            served[chunk.state.request.tenant] += chunk.length
        assert len(driver.scheduler.running) + len(driver.scheduler.ending) >= 2
    assert abs(served["flood"] - served["victim"]) <= 2 * 24


def test_fair_what_is_computed_again_is_not_charged_again():
    """A tenant whose request is preempted is charged for its tokens once."""
    driver = Driver(small_config(policy="fair", max_num_seqs=2, prefix_cache=False), 9)
    early, late = state("a", 9, 20, tenant="a"), state("b", 9, 20, tenant="b")
    driver.add(early, late)
    queue = driver.scheduler.waiting
    assert isinstance(queue, FairQueue)
    charged: Counter[str] = Counter()
    charge = queue.charge

    def count(state: RequestState, num_tokens: int) -> None:
        charged[state.request.tenant] += num_tokens
        charge(state, num_tokens)

    queue.charge = count
    while driver.scheduler.live:
        driver.step()
    assert late.num_preemptions > 0
    # The last token of each is sampled and never fed back.
    assert charged == {"a": 28, "b": 28}

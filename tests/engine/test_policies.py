"""Each policy alone, and in the scheduler: who is next, who gives way, how long anyone waits."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.configs.scheduling_config import PolicyName, SchedulingConfig
from octavo.engine import policy_fair
from octavo.engine.keyed_queue import MAX_STALE_ENTRIES, KeyedQueue
from octavo.engine.policy import WaitingQueue, make_queue
from octavo.engine.policy_deadline import LATE_TARGETS, DeadlineQueue
from octavo.engine.policy_fair import FairQueue
from octavo.engine.policy_fcfs import FcfsQueue
from octavo.engine.policy_priority import PriorityQueue
from octavo.engine.schedule import RequestState, Schedule

from .fakes import planned_costs, request, small_config
from .test_scheduler import Driver, ids, inserts

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


def deadline_queue(default_target_s: float = 10.0) -> DeadlineQueue:
    """Its 8 tokens of prompt take 1.1 ms."""
    return DeadlineQueue(default_target_s, planned_costs(small_config()))


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_requests_are_served_as_they_came(policy: PolicyName):
    """Breaks if ties are settled by anything but the order of arrival."""
    queue = make_queue(SchedulingConfig(policy=policy), 4, planned_costs(small_config()))
    assert isinstance(queue, WaitingQueue)
    fill(queue, *(state(f"r{n}") for n in range(30)))
    assert len(queue) == len(list(queue)) == 30
    assert drain(queue) == [f"r{n}" for n in range(30)]
    assert len(queue) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_blocked_tenant_is_passed_over_and_comes_back_where_it_was(policy: PolicyName):
    queue = make_queue(SchedulingConfig(policy=policy), 4, planned_costs(small_config()))
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
    queue = make_queue(SchedulingConfig(policy=policy), 4, planned_costs(small_config()))
    states = [state(f"r{n}") for n in range(9)]
    fill(queue, *states)
    for each in states[::2]:
        queue.remove(each)
    assert drain(queue) == [f"r{n}" for n in range(1, 9, 2)]


def test_a_queue_keeps_no_trace_of_requests_that_are_gone():
    """A million requests come and go beside one that waits; also while their tenant is blocked.

    Breaks if a blocked tenant's entries are only dropped when it is unblocked: one long request
    that holds the tenant's last slot may run for hours.
    """
    queue = KeyedQueue(FcfsQueue().rank)
    waits = state("waits")
    queue.push(waits)
    for is_blocked in (False, True):
        if is_blocked:
            queue.block("")
        for ordinal in range(1, 2000):
            passing = state("passing")
            passing.ordinal = ordinal
            queue.push(passing)
            assert queue.first() is (None if is_blocked else waits)
            queue.remove(passing)
        kept = len(queue._heap) + sum(map(len, queue._blocked.values()))
        assert kept <= 2 * (2 + MAX_STALE_ENTRIES)
    queue.unblock("")
    assert queue.first() is waits


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
    assert queue.may_displace(state("newcomer", **newcomer), state("running", **running)) is may


@pytest.mark.parametrize("policy", ["fcfs", "fair", "deadline"])
def test_no_other_policy_displaces(policy: PolicyName):
    queue = make_queue(SchedulingConfig(policy=policy), 4, planned_costs(small_config()))
    assert not queue.may_displace(state("a", priority=9), state("b"))


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
    served = _serve(FairQueue({}, 4), {"flood": 100, "victim": 1}, 1000)
    assert abs(served["flood"] - served["victim"]) <= 10


def test_fair_weighted_shares():
    served = _serve(FairQueue({"heavy": 3.0}, 4), {"heavy": 5, "light": 5}, 4000)
    assert abs(served["heavy"] - 3 * served["light"]) <= 40


def test_fair_shares_are_of_tokens_not_of_requests():
    """A tenant of requests ten times as long gets a tenth as many."""
    queue = FairQueue({}, 4)
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
    queue = FairQueue({}, 4)
    fill(queue, *(state(f"a{n}", tenant="a") for n in range(9)))
    assert len(drain(queue)) == 9


def test_fair_a_pause_saves_nothing_up():
    """Breaks if a tenant that was away may catch up: it would have the engine for itself."""
    queue = FairQueue({}, 4)
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
    queue = FairQueue({}, 4)
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
    queue = FairQueue({}, 4)
    fresh, again = state("fresh"), state("again")
    fill(queue, fresh)
    again.ordinal, again.num_preemptions = 7, 1
    queue._num_live[""] += 1
    queue.push(again)
    assert drain(queue) == ["again", "fresh"]


def test_fair_memory_is_bounded_for_a_million_tenants(monkeypatch: pytest.MonkeyPatch):
    """Each comes once, is served and goes; scaled down, with the bound scaled as well.

    Breaks if a counter is kept for everybody who ever came.
    """
    monkeypatch.setattr(policy_fair, "MAX_IDLE_TENANTS", 64)
    queue = FairQueue({}, 4)
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


def test_deadline_the_first_due_is_next():
    """Those without a target are due by the default."""
    queue = deadline_queue(10.0)
    fill(
        queue,
        state("default"),
        state("tight", ttft_target_s=1.0),
        state("earlier", ttft_target_s=11.0, arrival_s=-3.0),
        state("loose", ttft_target_s=100.0),
        state("tie", ttft_target_s=10.0),
    )
    assert drain(queue) == ["tight", "earlier", "default", "tie", "loose"]


def test_deadline_who_cannot_make_it_gives_way_to_who_can():
    """Earliest first alone makes everybody late in overload, because it goes on with the latest."""
    queue = deadline_queue(10.0)
    fill(
        queue,
        state("hopeless", prompt=80, ttft_target_s=0.5),  # 11 ms
        state("just", prompt=80, ttft_target_s=0.511),
        state("fine", ttft_target_s=1.0),
    )
    assert drain(queue, now_s=0.4995) == ["just", "fine", "hopeless"]


def test_deadline_hopeless_ones_wait_no_longer_than_a_bound():
    """Breaks if they stand behind everybody who ever comes: one is next LATE_TARGETS later."""
    queue = deadline_queue(1.0)
    fill(queue, state("late", prompt=80, ttft_target_s=0.001))
    ordinal, served_s = 1, None
    for step in range(200):
        now_s = step / 10
        fresh = state(f"fresh{step}", arrival_s=now_s, ttft_target_s=1.0)
        fresh.ordinal, fresh.prefill_end, fresh.num_uncached_tokens = ordinal, 4, 4
        ordinal += 1
        queue.push(fresh)
        first = queue.first(now_s)
        assert first is not None
        queue.remove(first)
        queue.depart(first)
        if first.request.request_id == "late":
            served_s = now_s
            break
    assert served_s is not None
    assert served_s <= LATE_TARGETS * 1.0 + 0.2


def test_deadline_a_preempted_request_is_not_hopeless():
    """It had its chance in time; behind everybody it would starve with what it holds unread."""
    queue = deadline_queue(1.0)
    again, fresh = state("again", ttft_target_s=0.001), state("fresh")
    again.num_preemptions = 1
    fill(queue, again, fresh)
    assert drain(queue, now_s=0.5) == ["again", "fresh"]


def test_deadline_remembers_only_who_is_live():
    queue = deadline_queue(0.001)
    for ordinal in range(500):
        each = state("r", prompt=80)
        each.ordinal, each.prefill_end, each.num_uncached_tokens = ordinal, 80, 80
        queue.push(each)
        assert queue.first(5.0) is each
        queue.remove(each)
        queue.depart(each)
    assert not queue._late_ordinals


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

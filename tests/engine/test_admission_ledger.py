"""Every bound at its edge, promises that are kept, and clients by the thousand who obey."""

import itertools
import pickle
from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from octavo.configs.engine_config import EngineConfig
from octavo.configs.scheduling_config import SchedulingConfig
from octavo.engine import promises
from octavo.engine.admission_bound import Bound
from octavo.engine.admission_ledger import MAX_RETRY_S, MIN_RETRY_S, AdmissionLedger
from octavo.engine.promises import GRACE_S, PromiseBook, digest_of
from octavo.engine.refusals import InvalidRequest, Overloaded
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.schedule import RequestState
from octavo.engine.tenants import Tenant, Tenants

_content = itertools.count()


def _ledger(num_seqs: int = 2, tokens_per_s: float = 1024.0, **bounds: Any) -> AdmissionLedger:
    """Its pace to begin with: one request a second, of 1,024 tokens a second."""
    config = EngineConfig(max_num_seqs=num_seqs, scheduling=SchedulingConfig(**bounds))
    return AdmissionLedger(config, prefill_tokens_per_s=tokens_per_s, now_s=0.0)


def _state(
    request_id: str,
    num_tokens: int = 10,
    max_tokens: int = 10,
    tenant: str = "",
    content: int | None = None,
) -> RequestState:
    """Different from all others, unless `content` says what to be equal to."""
    content = next(_content) if content is None else content
    request = Request(
        request_id=request_id,
        prompt_token_ids=(content,) * num_tokens,
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival_s=0.0,
        tenant=tenant,
    )
    return RequestState(request=request, max_tokens=max_tokens, stop_ids=())


def _enter(ledger: AdmissionLedger, *request_ids: str, now_s: float = 0.0, **more: Any) -> None:
    for request_id in request_ids:
        ledger.enter(_state(request_id, **more), now_s)
        ledger.check()


def _refusal(ledger: AdmissionLedger, state: RequestState, now_s: float = 0.0) -> Overloaded:
    with pytest.raises(Overloaded) as refused:
        ledger.enter(state, now_s)
    ledger.check()
    assert not ledger.is_live(state.request.request_id)
    assert MIN_RETRY_S <= refused.value.retry_after_s <= MAX_RETRY_S
    return refused.value


# Bounds


def test_requests():
    ledger = _ledger(max_num_queued=3)
    _enter(ledger, *"abcde")
    refusal = _refusal(ledger, _state("f"))
    assert refusal.bound == "max_num_queued"
    assert str(refusal) == (
        "5 requests are live; max_num_seqs, 2, may run and max_num_queued, 3, may wait"
    )
    assert str(_refusal(ledger, _state("g"))).endswith("may wait; promised to others: 1")


def test_queued_tokens():
    ledger = _ledger(max_queued_tokens=100)
    ledger.enter(_state("a", 60), 0.0)
    ledger.enter(_state("b", 40), 0.0)
    assert ledger.queued_tokens == 100
    refusal = _refusal(ledger, _state("c", 1))
    assert refusal.bound == "max_queued_tokens"
    assert str(refusal) == (
        "100 prompt tokens wait and this prompt has 1; max_queued_tokens, 100, may wait"
    )


def test_a_prompt_beyond_max_queued_tokens_waits_alone():
    """It may be in the cache, so its length alone is no reason to refuse it for good."""
    ledger = _ledger(max_queued_tokens=100)
    ledger.enter(_state("a", 1), 0.0)
    refusal = _refusal(ledger, _state("long", 300, content=1))
    assert refusal.bound == "max_queued_tokens"
    ledger.started("a", 0.0, 0)
    ledger.enter(_state("long", 300, content=1), refusal.retry_after_s)
    assert _refusal(ledger, _state("b", 1), 1.0).bound == "max_queued_tokens"
    ledger.expect("long", 0)  # it is all cached
    ledger.enter(_state("b", 1), 100.0)
    ledger.check()


def test_predicted_wait_for_prompts():
    """A newcomer waits for what is ahead of it, not for its own prompt."""
    ledger = _ledger(num_seqs=8, max_predicted_wait_s=2.0)
    ledger.enter(_state("a", 2048), 0.0)
    assert ledger.predicted_wait_s(0.0) == 2.0
    ledger.enter(_state("b", 4096), 0.0)
    assert ledger.predicted_wait_s(0.0) == 6.0
    refusal = _refusal(ledger, _state("c", 1))
    assert refusal.bound == "max_predicted_wait_s"
    assert str(refusal) == "a slot will be free in 6.0 s; max_predicted_wait_s is 2"


def test_predicted_wait_for_slots():
    """At a request a second, the third in the queue waits three seconds."""
    ledger = _ledger(num_seqs=2, max_predicted_wait_s=3.0)
    _enter(ledger, *"abcde", num_tokens=1)
    assert _refusal(ledger, _state("f", 1)).bound == "max_predicted_wait_s"


def test_nobody_waits_for_free_slots():
    ledger = _ledger(num_seqs=3, max_predicted_wait_s=1.0)
    _enter(ledger, *"ab")
    for request_id in "ab":
        ledger.started(request_id, 0.0, 0)
        ledger.computed(request_id, 10, 0.0)
    assert ledger.predicted_wait_s(0.0) == 0.0


def test_tenant_queued():
    """Requests for which a slot is free do not wait, so they do not count against the bound."""
    ledger = _ledger(num_seqs=2, max_tenant_queued=1)
    ledger.enter(_state("a", tenant="x"), 0.0)
    ledger.enter(_state("b", tenant="x"), 0.0)
    for request_id in "ab":
        ledger.started(request_id, 0.0, 0)
    ledger.enter(_state("c", tenant="x"), 0.0)
    refusal = _refusal(ledger, _state("d", tenant="x"))
    assert refusal.bound == "max_tenant_queued"
    assert str(refusal) == "1 requests of tenant 'x' wait; max_tenant_queued, 1, may"
    ledger.enter(_state("e", tenant="y"), 0.0)


def test_a_tenant_that_may_not_run_more_has_no_free_slot():
    ledger = _ledger(num_seqs=8, max_tenant_running=1, max_tenant_queued=0)
    ledger.enter(_state("a", tenant="x"), 0.0)
    assert _refusal(ledger, _state("b", tenant="x")).bound == "max_tenant_queued"
    ledger.enter(_state("c", tenant="y"), 0.0)


def test_tenant_tokens():
    ledger = _ledger(max_tenant_tokens=100)
    ledger.enter(_state("a", 40, 20, tenant="x"), 0.0)
    ledger.started("a", 0.0, 0)  # running requests count, as do waiting ones
    ledger.enter(_state("b", 20, 20, tenant="x"), 0.0)
    refusal = _refusal(ledger, _state("c", 1, 1, tenant="x"))
    assert refusal.bound == "max_tenant_tokens"
    assert str(refusal) == (
        "requests of tenant 'x' hold 100 tokens and this one may need 2; max_tenant_tokens is 100"
    )
    ledger.enter(_state("d", 50, 50, tenant="y"), 0.0)
    ledger.left("b", 0.0)
    ledger.left("a", 1.0)
    ledger.check()


@pytest.mark.parametrize(
    ("bounds", "fits", "exceeds", "field"),
    [
        ({"max_tenant_tokens": 50}, (30, 20), (30, 21), "max_tokens"),
        ({"max_tenant_tokens": 50}, (49, 1), (50, 1), "max_tokens"),
    ],
)
def test_what_can_never_fit_is_invalid(
    bounds: dict[str, int], fits: tuple[int, int], exceeds: tuple[int, int], field: str
):
    """However empty the engine is, and however full."""
    ledger = _ledger(**bounds)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=f"{next(iter(bounds))} is 50") as refused:
            ledger.enter(_state("a", *exceeds), 0.0)
        assert refused.value.field == field
        ledger.check()
        if not ledger.is_live("b"):
            ledger.enter(_state("b", *fits), 0.0)


def test_a_live_id_is_invalid_even_when_full():
    ledger = _ledger(num_seqs=1, max_num_queued=0)
    _enter(ledger, "a")
    with pytest.raises(InvalidRequest, match="request_id is 'a'"):
        ledger.enter(_state("a"), 0.0)
    ledger.left("a", 0.5)
    ledger.left("a", 0.5)
    _enter(ledger, "a", now_s=0.5)
    assert ledger.num_live == 1


def test_a_refusal_crosses_a_process_border():
    ledger = _ledger(num_seqs=1, max_num_queued=0)
    _enter(ledger, "a")
    refusal = _refusal(ledger, _state("b"))
    copy = pickle.loads(pickle.dumps(refusal))
    assert (str(copy), copy.bound, copy.retry_after_s) == (
        str(refusal),
        refusal.bound,
        refusal.retry_after_s,
    )


# What the engine tells


def test_cached_tokens_are_no_work():
    ledger = _ledger(max_queued_tokens=100)
    ledger.enter(_state("a", 100), 0.0)
    ledger.expect("a", 20)
    assert ledger.queued_tokens == 20
    ledger.enter(_state("b", 80), 0.0)
    assert _refusal(ledger, _state("c", 1)).bound == "max_queued_tokens"
    ledger.expect("a", 100)  # the pages were evicted again
    assert ledger.queued_tokens == 180
    ledger.check()


def test_chunks_under_way_are_work_that_shrinks():
    """Counters that see only starts and ends take a long prompt for waiting to its end."""
    ledger = _ledger(num_seqs=8)
    ledger.enter(_state("a", 4096), 0.0)
    ledger.started("a", 0.0, 1024)
    assert ledger.queued_tokens == 0
    assert ledger.predicted_wait_s(0.0) == 3.0
    for now_s in (1.0, 2.0, 3.0):
        ledger.computed("a", 1024, now_s)
    assert ledger.predicted_wait_s(3.0) == 0.0
    ledger.check()


def test_a_preempted_request_waits_again_and_is_never_refused():
    ledger = _ledger(num_seqs=1, max_num_queued=1, max_queued_tokens=20, max_tenant_queued=1)
    ledger.enter(_state("a", 10), 0.0)
    ledger.started("a", 0.0, 0)
    ledger.enter(_state("b", 20), 0.0)
    ledger.requeued("a", 1.0, 15)
    ledger.check()
    assert ledger.queued_tokens == 35
    ledger.started("a", 2.0, 10)
    ledger.check()
    assert ledger.queued_tokens == 20


def test_what_is_said_twice_or_of_strangers_changes_nothing():
    ledger = _ledger()
    _enter(ledger, *"ab")
    for _ in range(2):
        ledger.computed("a", 5, 0.0)
        ledger.requeued("a", 0.0, 10)
        assert ledger.queued_tokens == 20
    for _ in range(2):
        ledger.started("a", 0.0, 4)
        ledger.expect("a", 0)
        assert ledger.queued_tokens == 10
        ledger.left("z", 0.0)
        ledger.started("z", 0.0, 0)
        ledger.check()
    for _ in range(2):
        ledger.left("a", 1.0)
        assert ledger.num_live == 1
        ledger.check()


def test_time_that_runs_backwards_stands_still():
    ledger = _ledger(num_seqs=1, max_num_queued=0)
    _enter(ledger, "a", now_s=5.0)
    forwards = _refusal(ledger, _state("b", content=1), 5.0)
    backwards = _refusal(ledger, _state("b", content=1), 2.0)
    assert backwards.retry_after_s == forwards.retry_after_s


# Promises


def _full() -> AdmissionLedger:
    """One slot, one place, both taken; a request a second."""
    ledger = _ledger(num_seqs=1, max_num_queued=1)
    _enter(ledger, *"ab")
    return ledger


def test_retry_times_are_spaced_by_the_pace():
    """Clients told the same time would come as a herd."""
    ledger = _full()
    times_s = [_refusal(ledger, _state(f"c{n}")).retry_after_s for n in range(20)]
    gaps_s = [later - sooner for sooner, later in itertools.pairwise(times_s)]
    assert min(gaps_s) == pytest.approx(max(gaps_s))
    assert 1.0 <= gaps_s[0] <= 1.2


def test_a_promise_is_kept_from_newcomers():
    ledger = _full()
    retry_s = _refusal(ledger, _state("c", content=1)).retry_after_s
    ledger.left("a", retry_s)
    assert _refusal(ledger, _state("d"), retry_s).bound == "max_num_queued"
    ledger.enter(_state("another id", content=1), retry_s)
    ledger.check()
    assert ledger.num_promises == 1


def test_coming_early_keeps_the_promise_and_is_told_the_rest():
    ledger = _full()
    retry_s = _refusal(ledger, _state("c", content=1)).retry_after_s
    again_s = _refusal(ledger, _state("c", content=1), 0.5).retry_after_s
    assert again_s == pytest.approx(retry_s - 0.5)
    assert ledger.num_promises == 1


def test_alike_clients_get_a_promise_each():
    """Breaks if only some do: the others would all be told the same time, and come as a herd."""
    ledger = _full()
    times_s = [_refusal(ledger, _state(f"c{n}", content=1)).retry_after_s for n in range(50)]
    assert len(set(times_s)) == ledger.num_promises == 50
    assert times_s == sorted(times_s)
    again_s = [_refusal(ledger, _state(f"c{n}", content=1)).retry_after_s for n in range(50)]
    assert again_s == times_s


def test_a_client_that_keeps_its_id_keeps_its_promise():
    """Breaks if whoever asks for the same may use a promise to another one that keeps its own."""
    ledger = _full()
    sooner_s, later_s = (
        _refusal(ledger, _state(f"c{n}", content=1)).retry_after_s for n in range(2)
    )
    again = _refusal(ledger, _state("c1", content=1), sooner_s)
    assert again.retry_after_s == pytest.approx(later_s - sooner_s)
    assert ledger.num_promises == 2


def test_a_free_slot_is_kept_for_nobody():
    """Fails, for as long as the grace, if clients that were promised a place need not come."""
    ledger = _ledger(num_seqs=2, max_num_queued=2)
    for name in "abcd":
        ledger.enter(_state(name), 0.0)
    retry_s = max(_refusal(ledger, _state(f"p{n}", content=n)).retry_after_s for n in range(3))
    for name in "abc":
        ledger.left(name, retry_s)
    ledger.enter(_state("new", content=10), retry_s)  # beside d
    assert _refusal(ledger, _state("next", content=11), retry_s).bound == "max_num_queued"
    for n in range(2):  # the places in the queue were kept
        ledger.enter(_state(f"again{n}", content=n), retry_s)
    ledger.check()


def test_a_promise_lapses():
    ledger = _full()
    retry_s = _refusal(ledger, _state("c", content=1)).retry_after_s
    ledger.left("a", retry_s)
    _refusal(ledger, _state("d", content=2), retry_s + GRACE_S)
    ledger.enter(_state("e"), retry_s + 1000.0)
    assert ledger.num_promises == 0
    ledger.check()


def test_promises_of_one_tenant_do_not_keep_another_out():
    ledger = _ledger(num_seqs=8, max_num_queued=100, max_tenant_queued=2, max_tenant_tokens=1000)
    for n in range(10):
        ledger.enter(_state(f"a{n}", 1, 1, tenant="x"), 0.0)
        ledger.started(f"a{n}", 0.0, 0) if n < 8 else None
    for n in range(500):
        assert _refusal(ledger, _state(f"b{n}", tenant="x")).bound.startswith("max_tenant")
    for n in range(2):
        ledger.enter(_state(f"c{n}", tenant="y"), 0.0)


def test_no_shows_of_one_tenant_do_not_devalue_promises_to_another():
    """Fails if trust is kept for all tenants together: x's clients never come back."""
    book, tenants = PromiseBook(), Tenants(SchedulingConfig())
    bound = Bound(room=1, start_per_s=1.0, now_s=0.0)
    x, y = (tenants.get(name, requests_per_s=1.0, tokens_per_request=1, now_s=0.0) for name in "xy")

    def book_one(tenant: Tenant, due_s: float) -> None:
        wanted = _state(f"{due_s}", tenant=tenant.name).request
        book.book(wanted, tenant, digest_of(wanted), due_s, [(bound, 1)])

    for n in range(300):
        book_one(x, 10.0 * n)
        assert len(book.lapse(10.0 * n + GRACE_S + 1)) == 1
    bound.enter(1, 3000.0)
    book_one(x, 3001.0)
    after_x_s = bound.earliest_s(1, 3000.0)
    book_one(y, 3002.0)
    assert bound.earliest_s(1, 3000.0) - after_x_s == pytest.approx(1 / bound.rate.per_s, rel=0.2)
    assert y.kept_share == 1.0
    assert x.kept_share < 0.1


def test_others_soon_stop_waiting_for_a_flood_that_does_not_come_back():
    """Breaks if promises count in full until they lapse, or if a tenant that has nothing left is
    trusted anew. Eight requests a second are served, and x asks for 3,000 places at once, twice."""
    ledger = _ledger(num_seqs=8, tokens_per_s=8 * 1024.0, max_num_queued=16)
    now_s, live = 0.0, deque[str]()

    def try_to_enter(name: str, tenant: str) -> float:
        """Says when to come back, which nobody does."""
        try:
            ledger.enter(_state(name, tenant=tenant), now_s)
        except Overloaded as refusal:
            return refusal.retry_after_s
        live.append(name)
        return 0.0

    def flood() -> None:
        for n in range(3000):
            try_to_enter(f"x{now_s} {n}", "x")

    def serve(seconds: float) -> None:
        nonlocal now_s
        for _ in range(round(seconds * 8)):
            now_s += 1 / 8
            if live:
                ledger.left(live.popleft(), now_s)
            try_to_enter(f"z{now_s}", "z")

    flood()
    assert try_to_enter("y0", "y") > 300.0
    serve(30.0)
    assert try_to_enter("y1", "y") < 60.0
    serve(600.0)
    assert ledger.num_promises < 100
    flood()
    assert try_to_enter("y2", "y") < 60.0


def test_a_flooding_tenant_leaves_half_the_promises_to_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(promises, "MAX_PROMISES", 64)
    ledger = _full()
    for n in range(500):
        _refusal(ledger, _state(f"x{n}", tenant="x"))
    assert ledger.num_promises == 32
    for n in range(500):
        _refusal(ledger, _state(f"y{n}", tenant="y"))
    assert ledger.num_promises == 48


def test_time_stands_still_in_a_pause():
    """Nothing drains then, and that is not the pace; nobody could have come back either."""

    def run(*, pause_s: float) -> list[float]:
        ledger = _full()
        told_s = [_refusal(ledger, _state(f"c{n}", content=n)).retry_after_s for n in range(3)]
        if pause_s:
            ledger.pause(0.5)
            ledger.pause(0.5 + pause_s / 2)
            _refusal(ledger, _state("c0", content=0), 0.5 + pause_s)  # the promise is kept
            ledger.resume(0.5 + pause_s)
            ledger.resume(0.5 + 2 * pause_s)
        now_s = pause_s + told_s[0] + 1e-6
        ledger.left("a", now_s)
        ledger.enter(_state("c0", content=0), now_s)
        told_s += [
            _refusal(ledger, _state(f"d{n}", content=n), now_s).retry_after_s for n in range(3, 6)
        ]
        ledger.check()
        return [*told_s, ledger.predicted_wait_s(now_s)]

    assert run(pause_s=3600.0) == pytest.approx(run(pause_s=0.0), rel=1e-6)


def test_promises_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(promises, "MAX_PROMISES", 50)
    ledger = _full()
    times_s = [_refusal(ledger, _state(f"c{n}", tenant=f"t{n}")).retry_after_s for n in range(200)]
    assert ledger.num_promises == 50
    assert times_s[50] == times_s[-1] > times_s[49]
    assert len(ledger._tenants.all()) == 51, "tenants that have nothing are kept"


def test_no_promise_is_made_for_later_than_anyone_waits():
    ledger = _full()
    times_s = []
    for n in range(1000):
        with pytest.raises(Overloaded) as refused:
            ledger.enter(_state(f"c{n}"), 0.0)
        times_s.append(refused.value.retry_after_s)
    ledger.check()
    assert times_s[-1] == MAX_RETRY_S
    assert 500 < ledger.num_promises < 600


def test_the_digest_tells_requests_apart_and_ids_not():
    base = Request(
        request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(), arrival_s=0.0
    )

    def changed(**changes: Any) -> bytes:
        return digest_of(Request(**{**vars(base), **changes}))

    assert digest_of(base) == changed(request_id="b", arrival_s=9.0)
    others = [
        digest_of(base),
        changed(tenant="t"),
        changed(prompt_token_ids=(1,)),
        changed(prompt_token_ids=(1, 2, 0)),
        changed(prompt_token_ids=(513,)),
        changed(sampling=SamplingParams(max_tokens=3)),
        changed(sampling=SamplingParams(stop_token_ids=(3,))),
        changed(tenant="\ud800"),
    ]
    assert len(set(others)) == len(others)


# All of it, in any order


class _Machine(RuleBasedStateMachine):
    """Checks after every call, and that nothing but preemption exceeds a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = _ledger(
            num_seqs=2,
            max_num_queued=3,
            max_queued_tokens=40,
            max_predicted_wait_s=5.0,
            max_tenant_queued=2,
            max_tenant_tokens=60,
        )
        self.now_s = 0.0

    ids = st.sampled_from("abcdefghij")

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 7.0, 1000.0, -1.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        request_id=ids,
        num_tokens=st.integers(1, 45),
        tenant=st.sampled_from("xyz"),
        content=st.integers(0, 3),
    )
    def enter(self, request_id: str, num_tokens: int, tenant: str, content: int) -> None:
        was_live = self.ledger.is_live(request_id)
        num_live = self.ledger.num_live
        try:
            self.ledger.enter(_state(request_id, num_tokens, 10, tenant, content), self.now_s)
        except InvalidRequest:
            assert was_live
        except Overloaded:
            assert num_live or self.ledger.num_promises
        else:
            assert not was_live
            assert self.ledger.num_live <= 5

    @rule(request_id=ids, num_cached_tokens=st.integers(0, 45))
    def start(self, request_id: str, num_cached_tokens: int) -> None:
        self.ledger.started(request_id, self.now_s, num_cached_tokens)

    @rule(request_id=ids, num_tokens=st.integers(0, 45))
    def compute(self, request_id: str, num_tokens: int) -> None:
        self.ledger.computed(request_id, num_tokens, self.now_s)

    @rule(request_id=ids, num_tokens=st.integers(1, 60))
    def preempt(self, request_id: str, num_tokens: int) -> None:
        self.ledger.requeued(request_id, self.now_s, num_tokens)

    @rule(request_id=ids, num_tokens=st.integers(0, 60))
    def expect(self, request_id: str, num_tokens: int) -> None:
        self.ledger.expect(request_id, num_tokens)

    @rule(request_id=ids)
    def leave(self, request_id: str) -> None:
        self.ledger.left(request_id, self.now_s)

    @rule()
    def pause(self) -> None:
        self.ledger.pause(self.now_s)

    @rule()
    def resume(self) -> None:
        self.ledger.resume(self.now_s)

    @invariant()
    def holds(self) -> None:
        self.ledger.check()
        assert 0 <= self.ledger.predicted_wait_s(self.now_s) < float("inf")


TestMachine = _Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=60, derandomize=True)

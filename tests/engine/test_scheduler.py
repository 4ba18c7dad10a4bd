"""Order, budget, pages and preemption, without an engine: results are read one step behind."""

import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine.packing import UploadLayout
from octavo.engine.places import MAX_UNTRIED
from octavo.engine.schedule import RequestState, Schedule
from octavo.engine.scheduler import Scheduler
from octavo.engine.step_costs import StepCosts
from octavo.engine.step_shapes import MAX_SEGMENTS, StepShapes

from .fakes import planned_costs, request, small_config


def state(request_id: str, prompt: int, max_tokens: int, deadline_s: float | None = None):
    return RequestState(
        request=request(request_id, [1] * prompt, deadline_s=deadline_s),
        max_tokens=max_tokens,
        stop_ids=(),
    )


def ids(states: Sequence[RequestState]) -> list[str]:
    return [state.request.request_id for state in states]


def chunks(schedule: Schedule) -> list[tuple[str, int, int]]:
    return [
        (chunk.state.request.request_id, chunk.start, chunk.length) for chunk in schedule.chunks
    ]


def inserts(schedule: Schedule) -> list[str]:
    return ids([chunk.state for chunk in schedule.chunks if chunk.is_insert])


def _plain(schedule: Schedule) -> tuple[object, ...]:
    return (
        [(row.request.request_id, row.slot) for row in schedule.decodes],
        chunks(schedule),
        schedule.page_entries,
    )


class Driver:
    """Schedules each step before the one before it is read, and checks every one of them."""

    def __init__(
        self,
        config: EngineConfig,
        num_pages: int,
        costs: StepCosts | None = None,
        *,
        max_host_pages: int = 0,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(
            config, num_pages, costs or planned_costs(config), max_host_pages=max_host_pages
        )
        self.unread: deque[Schedule] = deque()
        self.num_steps = 0
        self.log: list[tuple[object, ...]] = []

    def add(self, *states: RequestState) -> None:
        for new in states:
            self.scheduler.add(new)

    def step(self, is_stop: Callable[[RequestState], bool] = lambda state: False) -> Schedule:
        """The next step; `is_stop` says for which requests the token that is read is the last."""
        is_behind = bool(self.unread)
        schedule = self.dispatch()
        if is_behind:
            self.read(is_stop)
        return schedule

    def dispatch(self) -> Schedule:
        """Schedules a step; an empty one stands for nothing to do."""
        schedule = self.scheduler.schedule(float(self.num_steps))
        self.scheduler.check()
        self.num_steps += 1
        if schedule is None:
            # Nothing to dispatch must mean that all are in flight, or the loop would spin.
            assert self.unread or not self.scheduler.live
            return Schedule(decodes=(), chunks=(), page_entries=())
        self._check(schedule)
        self.log.append((*_plain(schedule), ids(self.scheduler.preempted)))
        self.unread.append(schedule)
        return schedule

    def read(self, is_stop: Callable[[RequestState], bool] = lambda state: False) -> None:
        step = self.unread.popleft()
        rows: list[RequestState] = []
        for row, generation in zip(step.decodes, step.generations, strict=True):
            if row.generation == generation:
                self.scheduler.take_token(row, 1)
                rows.append(row)
        for chunk in step.chunks:
            if chunk.state.generation == chunk.generation:
                self.scheduler.take_chunk(chunk, 1 if chunk.is_last else None)
                rows += [chunk.state] * chunk.is_last
        for row in rows:
            if len(row.output_token_ids) == row.max_tokens or is_stop(row):
                self.scheduler.remove(row, float(self.num_steps))
        self.scheduler.check()

    def _check(self, schedule: Schedule) -> None:
        """The limits that the upload and the compiled shapes rely on."""
        num_chunk_tokens = sum(chunk.length for chunk in schedule.chunks)
        assert len(schedule.decodes) + num_chunk_tokens <= self.config.token_budget
        assert num_chunk_tokens <= self.config.prefill_chunk_tokens
        key = StepShapes.from_config(self.config).key_for(len(schedule.decodes), num_chunk_tokens)
        layout = UploadLayout(key, self.config.max_num_seqs, self.config.page_size, 1, 2)
        num_rows = len(inserts(schedule)) + len(schedule.inserts)
        assert max(len(schedule.chunks), num_rows) <= key.segments
        assert len(schedule.page_entries) <= layout.parts["page_entries"][0]
        states = [*schedule.decodes, *(chunk.state for chunk in schedule.chunks)]
        assert len(set(map(id, states))) == len(states), "a request is in a step twice"
        assert all(row.slot is not None for row in states)
        assert not set(map(id, self.scheduler.preempted)) & set(map(id, states)), "back at once"


def test_decode_rows_first_then_prompts_under_way_then_admissions():
    driver = Driver(small_config(prefill_chunk_tokens=8, max_num_batched_tokens=9), 60)
    driver.add(state("a", 3, 50), state("b", 12, 50), state("c", 5, 50))
    assert chunks(driver.step()) == [("a", 0, 3), ("b", 0, 5)]
    schedule = driver.step()
    assert ids(schedule.decodes) == ["a"]
    assert chunks(schedule) == [("b", 5, 7), ("c", 0, 1)]
    schedule = driver.step()
    assert ids(schedule.decodes) == ["a", "b"]
    assert chunks(schedule) == [("c", 1, 4)]


def test_decode_rows_take_their_tokens_from_the_budget():
    driver = Driver(small_config(max_num_seqs=2, max_num_batched_tokens=3), 60)
    driver.add(state("a", 1, 50), state("b", 20, 50))
    driver.step()
    schedule = driver.step()
    assert ids(schedule.decodes) == ["a"]
    assert chunks(schedule) == [("b", 2, 2)]


def test_no_more_segments_than_a_step_has():
    driver = Driver(small_config(max_num_seqs=20, prefill_chunk_tokens=64), 100)
    driver.add(*(state(f"r{i}", 1, 50) for i in range(20)))
    assert [len(driver.step().chunks) for _ in range(3)] == [MAX_SEGMENTS, MAX_SEGMENTS, 4]


def test_nobody_passes_a_head_of_line_that_does_not_fit():
    """`big` needs 5 of 8 pages and 3 are free; `small` would fit and has to wait all the same."""
    driver = Driver(small_config(), 9)
    driver.add(state("first", 16, 3), state("big", 18, 2), state("small", 1, 1))
    admitted = [
        chunk.state.request.request_id
        for _ in range(9)
        for chunk in driver.step().chunks
        if chunk.is_insert
    ]
    assert admitted == ["first", "big", "small"]


def test_a_newcomer_leaves_room_for_what_runs_to_grow():
    """Fails without the headroom: `b` would get the last page and be preempted in the next step."""
    driver = Driver(small_config(), 4)
    driver.add(state("a", 3, 6), state("b", 4, 4))
    while driver.scheduler.live:
        driver.step()
        assert not driver.scheduler.preempted


def test_a_newcomer_leaves_the_pages_that_a_prompt_under_way_still_needs():
    """`a` holds 2 pages of the 6 that its prompt needs; `b` must not take the other 4 as free."""
    driver = Driver(small_config(prefill_chunk_tokens=8), 9)
    driver.add(state("a", 22, 2))
    driver.step()
    driver.add(state("b", 12, 2))
    while driver.scheduler.live:
        driver.step()
        assert not driver.scheduler.preempted


def _run_out_of_pages(driver: Driver) -> Schedule:
    """Steps until a step preempts."""
    while True:
        schedule = driver.step()
        if driver.scheduler.preempted:
            return schedule


def test_preempts_the_latest_which_reenters_ahead_of_those_that_never_ran():
    """Kind 5.3: a preempted request queued at the end starves."""
    driver = Driver(small_config(max_num_seqs=3), 9)
    driver.add(*(state(name, 4, 20) for name in "abcd"))
    schedule = _run_out_of_pages(driver)
    assert ids(driver.scheduler.preempted) == ["c"]
    assert ids(schedule.decodes) == ["a", "b"]
    assert {each.request.request_id for each in driver.scheduler.waiting} == {"c", "d"}
    admitted: list[str] = []
    while driver.scheduler.live:
        admitted += inserts(driver.step())
    assert admitted.index("c") < admitted.index("d")


def test_a_preempted_request_comes_back_only_when_its_tokens_were_read():
    """Its next prefill must contain every token that it has sampled, and repeat none."""
    driver = Driver(small_config(max_num_seqs=2), 9)
    a, b = state("a", 9, 24), state("b", 9, 24)
    driver.add(a, b)
    driver.dispatch()
    driver.dispatch()
    while not driver.scheduler.preempted:
        driver.read()
        driver.dispatch()
    assert (b.slot, b.page_ids, b.num_computed_tokens) == (None, [], 0)
    assert (b.num_preemptions, b.in_flight) == (1, 1)
    driver.scheduler.remove(a, 0.0)  # slots and pages are free, yet b has to wait
    assert driver.scheduler.schedule(0.0) is None
    driver.read()
    assert [chunk.state for chunk in driver.dispatch().chunks] == [b]
    assert b.prefill_end == 9 + len(b.output_token_ids)
    assert b.num_sampled - len(b.output_token_ids) == (not b.is_prefilling)


def test_a_request_that_cannot_grow_preempts_itself_if_it_is_the_latest():
    driver = Driver(small_config(max_num_seqs=2), 6)
    a, b = state("a", 2, 18), state("b", 2, 18)
    driver.add(a, b)
    while driver.scheduler.live:
        driver.step()
    assert a.num_preemptions == 0
    assert b.num_preemptions > 0


def test_a_request_alone_is_not_preempted_though_its_prompt_is_cached():
    """It computes its last page anew, and needs the whole pool.

    Breaks if it keeps the cached copy as well: it would run out of pages, and a step with nothing
    to run would come while somebody waits.
    """
    driver = Driver(small_config(page_size=1, max_num_seqs=1), 3)
    driver.add(state("a", 1, 1), state("b", 1, 2))
    for _ in range(4):
        driver.dispatch()
        if driver.unread:
            driver.read()
    assert not driver.scheduler.live
    assert driver.scheduler.preemptions_total == 0


def test_the_earliest_is_never_held_up_by_a_stream_of_newcomers():
    """Starvation: with pages for little more than one request, `first` still gets every step."""
    driver = Driver(small_config(), 9)
    first = state("first", 10, 20)
    driver.add(first)
    for step in range(2 + 20):
        driver.add(state(f"later{step}", 3, 10))
        driver.step()
    assert len(first.output_token_ids) == 20
    assert first.num_preemptions == 0


def test_everyone_is_served_within_a_bound():
    """Watchdog of kind 5.1: each request ends, in no more steps than if they ran one by one."""
    driver = Driver(small_config(max_num_seqs=3), 8)
    lengths = [(n % 9 + 1, n % 7 + 1) for n in range(40)]
    driver.add(*(state(f"r{n}", prompt, out) for n, (prompt, out) in enumerate(lengths)))
    alone = sum(-(-prompt // 8) + out for prompt, out in lengths)
    while driver.scheduler.live:
        driver.step()
        assert driver.num_steps <= alone + 1


def test_slot_and_pages_are_free_as_soon_as_the_last_token_is_dispatched():
    """Steps run in order, so the next request may have them before that token is read."""
    driver = Driver(small_config(max_num_seqs=1), 3)
    driver.add(state("a", 5, 1), state("b", 5, 1))
    assert chunks(driver.step()) == [("a", 0, 5)]
    assert chunks(driver.step()) == [("b", 0, 5)]


def test_what_one_token_requests_computed_is_kept_unless_pages_are_needed():
    """All their steps are dispatched before the first is read. Breaks if pages go at once."""
    driver = Driver(small_config(max_num_seqs=2), 5)
    driver.add(state("a", 9, 1))
    for _ in range(3):
        driver.step()
    assert not driver.scheduler.live
    driver.add(again := state("b", 9, 1))
    assert chunks(driver.step()) == [("b", 8, 1)]
    assert again.num_cached_tokens == 8
    # `c` needs all pages while those of `b` wait to be published.
    driver.add(state("c", 16, 1))
    assert chunks(driver.step()) == [("c", 8, 8)]


def test_a_deadline_is_kept_with_what_was_cached_meanwhile():
    """Breaks if what was cached when it came decides: its whole prompt takes 2.2 ms, not one."""
    for num_steps, is_cached in [(1, False), (4, True)]:
        driver = Driver(small_config(max_num_seqs=1), 20)
        driver.add(state("a", 16, 30), state("b", 16, 1, deadline_s=100.0))
        for _ in range(num_steps):
            driver.step()
        assert len(driver.scheduler.memory.cache) == (4 if is_cached else 0)
        assert ids(driver.scheduler.expired(99.999)) == ([] if is_cached else ["b"])


def test_none_of_those_that_cannot_make_it_is_begun():
    """Breaks if only the first is looked at: those behind it would be begun in the same step."""
    driver = Driver(small_config(), 60)
    driver.add(*(state(f"r{n}", 16, 3, deadline_s=1e-3) for n in range(3)), state("good", 3, 3))
    expired = driver.scheduler.expired(0.0)
    assert ids(expired) == ["r0", "r1", "r2"]
    for each in expired:
        driver.scheduler.remove(each, 0.0)
    assert inserts(driver.step()) == ["good"]


def test_nor_one_that_is_next_only_when_another_was_begun():
    """It is ended before the next step, and holds up those behind it no longer than that."""
    driver = Driver(small_config(), 60)
    driver.add(state("a", 3, 9), state("late", 16, 3, deadline_s=1e-3), state("b", 3, 9))
    assert driver.scheduler.expired(0.0) == []
    assert inserts(driver.step()) == ["a"]
    (late,) = driver.scheduler.expired(0.0)
    driver.scheduler.remove(late, 0.0)
    assert (late.request.request_id, late.admitted_s) == ("late", None)
    assert inserts(driver.step()) == ["b"]


def test_nor_one_whose_tenant_may_have_a_slot_again():
    """Its turn comes while the step is made, after those that expired were named."""
    driver = Driver(small_config(max_tenant_running=1), 60)
    driver.add(state("first", 3, 1))
    driver.step()
    driver.add(state("late", 16, 3, deadline_s=1e-3))
    assert driver.scheduler.expired(0.0) == []
    assert not inserts(driver.step())
    assert ids(driver.scheduler.expired(0.0)) == ["late"]


def test_an_idle_engine_tries_one_now_and_then_that_cannot_make_it():
    """Breaks if predictions that are too long end everybody: no step would show that they are."""
    driver = Driver(small_config(), 60)
    scheduler = driver.scheduler
    hopeless = [state(f"r{n}", 16, 3, deadline_s=1e-3) for n in range(2 * MAX_UNTRIED + 1)]
    driver.add(*hopeless)
    for each in scheduler.expired(0.0):
        scheduler.remove(each, 0.0)
    tried, *behind = hopeless[MAX_UNTRIED:]
    assert list(scheduler.live.values()) == [tried, *behind]
    assert inserts(driver.step()) == [tried.request.request_id]
    for each in scheduler.expired(0.0):
        scheduler.remove(each, 0.0)
    assert list(scheduler.live.values()) == [tried], "only an idle engine begins one"


def test_after_one_was_tried_as_many_are_not():
    driver = Driver(small_config(), 60)
    scheduler = driver.scheduler
    driver.add(*(state(f"r{n}", 16, 1, deadline_s=1e-3) for n in range(MAX_UNTRIED + 1)))
    for each in scheduler.expired(0.0):
        scheduler.remove(each, 0.0)
    for _ in range(3):
        driver.step()
    assert not scheduler.live
    driver.add(again := state("again", 40, 1, deadline_s=driver.num_steps + 1e-3))
    assert scheduler.expired(float(driver.num_steps)) == [again]


def test_nobody_gives_way_for_pages_that_others_hold_as_well():
    """`low` would leave one page; the four others are the prefix that `high` still reads."""
    driver = Driver(small_config(policy="priority", prefill_chunk_tokens=64), 13)
    prefix = list(range(16))
    for name, prompt, priority in [
        ("high", [*prefix, 20], 9),
        ("low", [*prefix, 21], 0),
        ("big", [30] * 32, 5),
    ]:
        one = request(name, prompt, priority=priority)
        driver.add(RequestState(request=one, max_tokens=12, stop_ids=()))
        driver.step()
        driver.step()
        assert not driver.scheduler.preempted
    high, low = driver.scheduler.running
    assert high.page_ids[:4] == low.page_ids[:4]
    assert ids(list(driver.scheduler.waiting)) == ["big"]


def test_a_request_that_will_end_by_length_is_not_dispatched_again():
    driver = Driver(small_config(), 9)
    driver.add(state("a", 2, 3))
    rows = [len(driver.step().decodes) for _ in range(5)]
    assert rows == [0, 1, 1, 0, 0]
    assert not driver.scheduler.live


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_removed_request_holds_nothing_though_steps_are_in_flight(num_steps: int):
    """Kinds 6.1 and 6.7: queued, in prefill, decoding."""
    driver = Driver(small_config(), 9)
    a = state("a", 18, 3)
    driver.add(a)
    for _ in range(num_steps):
        driver.step()
    driver.scheduler.remove(a, 0.0)
    driver.scheduler.check()
    assert driver.scheduler.memory.num_available == 8
    assert not driver.scheduler.live


def test_a_stop_that_is_read_frees_slot_and_pages():
    driver = Driver(small_config(), 9)
    driver.add(state("a", 2, 20))
    driver.step()
    driver.step(is_stop=lambda state: True)
    assert driver.scheduler.memory.num_available == 8
    assert not driver.step().decodes


def test_deadlines_of_ended_requests_are_not_kept_for_days():
    """A client's deadline may be a day; a server takes millions of requests by then."""
    driver = Driver(small_config(), 9)
    driver.add(live := state("live", 2, 2, deadline_s=7.0))
    for number in range(1000):
        driver.add(ended := state(f"r{number}", 2, 2, deadline_s=1e6))
        driver.scheduler.remove(ended, 0.0)
        driver.scheduler.check()  # bounds them
    assert driver.scheduler.expired(7.0) == [live]


def test_expired_at_the_deadline_not_before():
    driver = Driver(small_config(), 9)
    driver.add(state("a", 2, 2, deadline_s=5.0), state("b", 2, 2))
    assert driver.scheduler.expired(4.999) == []
    assert ids(tuple(driver.scheduler.expired(5.0))) == ["a"]


def test_refuses_what_it_could_never_run():
    scheduler = Scheduler(small_config(), 3, planned_costs(small_config()))
    with pytest.raises(ValueError, match="grows to 3 pages; the pool has 2"):
        scheduler.add(state("a", 4, 6))
    scheduler.add(state("a", 4, 5))
    with pytest.raises(ValueError, match="request_id is 'a'"):
        scheduler.add(state("a", 1, 1))


@pytest.mark.parametrize("seed", range(8))
def test_random_load_keeps_every_invariant_and_repeats(seed: int):
    """Random sizes, arrivals, stops and removals, far too few pages; twice, with equal schedules.

    Kind 5.6: fails if a schedule depends on anything but what was called.
    """
    first, second = _random_run(seed), _random_run(seed)
    assert first.log == second.log
    if seed == 0:
        assert any(preempted for *_, preempted in first.log)


def _random_run(seed: int) -> Driver:
    rng = random.Random(seed)
    config = small_config(
        max_num_seqs=rng.randint(1, 12),
        prefill_chunk_tokens=rng.randint(1, 20),
        page_size=rng.randint(1, 5),
    )
    num_pages = rng.randint(4, 16)
    most = (num_pages - 1) * config.page_size + 1
    driver = Driver(config, num_pages)
    live = driver.scheduler.live
    for number in range(80):
        if rng.random() < 0.4:
            prompt = rng.randint(1, most - 1)
            driver.add(state(f"r{number}", prompt, rng.randint(1, most - prompt)))
        if live and rng.random() < 0.05:
            driver.scheduler.remove(rng.choice(list(live.values())), 0.0)
        driver.step(is_stop=lambda state: rng.random() < 0.03)
    while live:
        driver.step()
    assert driver.scheduler.memory.num_available == driver.scheduler.memory.pool.num_usable
    return driver


def _damage_slots(scheduler: Scheduler) -> None:
    scheduler._free_slots.pop()


def _damage_pages(scheduler: Scheduler) -> None:
    scheduler.running[0].page_ids = scheduler.running[1].page_ids


def _damage_places(scheduler: Scheduler) -> None:
    scheduler.waiting.push(scheduler.running[0])


def _damage_order(scheduler: Scheduler) -> None:
    scheduler.running.reverse()


@pytest.mark.parametrize("damage", [_damage_slots, _damage_pages, _damage_places, _damage_order])
def test_check_notices_damage(damage: Callable[[Scheduler], None]):
    driver = Driver(small_config(), 20)
    driver.add(state("a", 3, 9), state("b", 3, 9))
    driver.step()
    damage(driver.scheduler)
    with pytest.raises(AssertionError):
        driver.scheduler.check()

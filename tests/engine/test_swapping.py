"""A deterministic engine: whoever is preempted keeps its KV, and nothing is computed twice.

On a fake device whose next token is a hash of what it reads through the page tables, so a page that
does not come back, or comes back to another place, is a wrong answer.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from octavo.configs.scheduling_config import PolicyName
from octavo.engine.engine import Engine
from octavo.engine.events import EventKind
from octavo.engine.request import Request
from octavo.engine.schedule import Schedule
from octavo.engine.swapping import Swapping

from .fake_guides import HeldGuides, guide
from .fakes import (
    Answer,
    Clock,
    add_request,
    collect,
    fake_engine,
    finish,
    request,
    run_alone,
    small_config,
    step,
)
from .state_machine import HISTORIES, few_entries
from .test_scheduler import Driver, chunks, ids, state


class Watch:
    """Counts how often each token of each request is computed, from what is dispatched."""

    def __init__(self, engine: Engine) -> None:
        self.computed: Counter[tuple[str, int]] = Counter()
        self.num_resumes = 0
        scheduler = engine._scheduler
        make = scheduler.schedule

        def schedule(now_s: float) -> Schedule | None:
            made = make(now_s)
            for row in () if made is None else made.decodes:
                self.computed[row.request.request_id, row.num_computed_tokens - 1] += 1
            for chunk in () if made is None else made.chunks:
                for at in range(chunk.start, chunk.start + chunk.length):
                    self.computed[chunk.state.request.request_id, at] += 1
            self.num_resumes += 0 if made is None else len(made.inserts)
            return made

        vars(scheduler)["schedule"] = schedule


def swapping_of(engine: Engine) -> Swapping:
    swapping = engine._scheduler._swapping
    assert swapping is not None
    return swapping


OPTIONS: list[dict[str, object]] = [
    {},
    {},
    {"temperature": 1.0, "seed": 5, "logprobs": True},
    {"prompt_logprobs": True},
    {"repetition_penalty": 1.5, "logit_bias": ((3, 1.5), (9, -2.0))},
    {"allowed_token_ids": (1, 2, 3, 4)},
]


POLICIES: tuple[PolicyName, ...] = ("priority", "fair", "fcfs", "deadline")


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        pytest.param(policy, seed, marks=[] if seed == at else pytest.mark.full)
        for at, policy in enumerate(POLICIES)
        for seed in range(4)
    ],
)
def test_nothing_is_computed_twice_and_every_answer_is_that_of_a_run_alone(
    policy: PolicyName, seed: int
) -> None:
    """Fails if a page is lost on the way, a rule or a mask is not entered again, or a step repeats.

    Short prompts and long outputs in few pages: most requests are preempted, some of them in the
    middle of their prompts.
    """
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4])
    config = small_config(
        policy=policy,
        deterministic=True,
        page_size=page_size,
        prefill_chunk_tokens=rng.choice([1, 2, 3]) * page_size,
        max_num_seqs=rng.choice([3, 6]),
        max_tenant_running=rng.choice([None, 2]),
        priority_ageing_s=5.0,
    )
    num_pages = 48 // page_size + 1
    clock = Clock()
    engine, executor = fake_engine(config, num_pages, clock, max_host_pages=300 // page_size)
    watch = Watch(engine)
    wanted: dict[str, Request] = {}
    answers: dict[str, Answer] = {}
    with few_entries(hits=rng.choice([1, 128]), rules=rng.choice([2, 256])):
        for number in range(60):
            one = request(
                f"r{number}",
                rng.choice(HISTORIES)[: rng.randint(1, 24)],
                max_tokens=rng.randint(1, 24),
                arrival_s=clock.now_s,
                tenant=rng.choice("ab"),
                priority=rng.randint(0, 3),
                **rng.choice(OPTIONS),
            )
            wanted[one.request_id] = one
            add_request(engine, one)
            for _ in range(rng.randint(0, 6)):
                clock.now_s += 0.1
                step(engine, answers)
        finish(engine, answers)
    for name, one in wanted.items():
        assert answers[name] == run_alone(one, config, engine.limits), name
        cached = answers[name].num_cached_tokens
        assert cached % config.prefill_chunk_tokens == 0
        last = len(one.prompt_token_ids) + len(answers[name].token_ids) - 1
        computed = {at: count for (whose, at), count in watch.computed.items() if whose == name}
        assert computed == dict.fromkeys(range(cached, last), 1), f"{name}: computed again, or not"
    load = engine.load()
    assert load.preemptions_total > 5
    assert load.cached_tokens_total > 0
    assert watch.num_resumes > 0
    assert executor.num_host_pages == load.num_host_pages == 0, "a copy leaked"
    assert len(swapping_of(engine).reserve) == 0
    assert len(set(executor.keys)) == 1, "more than one executable ran"


def test_admission_stops_when_the_reserve_is_full_and_everybody_ends() -> None:
    """Of four that may each grow to half of the pages, no more run than could be swapped out.

    With three, two of them may have to give way to the third's growth: 12 + 4 <= 8 + 8 pages.
    """
    config = small_config(deterministic=True, page_size=4, prefill_chunk_tokens=8)
    most_running: dict[int, int] = {}
    for num_host_pages in (0, 4, 7, 8):
        engine, _ = fake_engine(config, num_pages=9, max_host_pages=num_host_pages)
        for name in "abcd":
            add_request(engine, request(name, (1, 2, 3, 4), max_tokens=13))  # 4 pages in the end
        answers: dict[str, Answer] = {}
        most_running[num_host_pages] = 0
        while engine.has_work:
            step(engine, answers)
            running = len(engine._scheduler.running) + len(swapping_of(engine).swapped)
            most_running[num_host_pages] = max(most_running[num_host_pages], running)
        assert {len(answer.token_ids) for answer in answers.values()} == {13}
    assert most_running == {0: 2, 4: 2, 7: 2, 8: 3}


def test_a_newcomer_that_the_reserve_does_not_admit_is_passed_by_who_was_swapped_out() -> None:
    """Else both would wait for each other, once nobody runs any more."""
    config = small_config(
        policy="priority", deterministic=True, page_size=4, prefill_chunk_tokens=8, max_num_seqs=2
    )
    engine, _ = fake_engine(config, num_pages=9, max_host_pages=8)
    answers: dict[str, Answer] = {}
    for name, priority in (("low", 0), ("mid", 1)):
        add_request(engine, request(name, (1, 2), max_tokens=15, priority=priority))
    for _ in range(3):
        step(engine, answers)
    add_request(engine, request("high", (1, 2, 3), max_tokens=14, priority=5))
    for _ in range(3):
        step(engine, answers)
    assert ids(swapping_of(engine).swapped) == ["low"]
    add_request(engine, request("huge", (1, 2, 3), max_tokens=30, priority=9))
    finish(engine, answers)
    assert {name: len(answers[name].token_ids) for name in answers} == {
        "low": 15,
        "mid": 15,
        "high": 14,
        "huge": 30,
    }


@pytest.mark.parametrize(("num_host_pages", "gives_way"), [(0, False), (2, False), (3, True)])
def test_nobody_gives_way_without_room_in_host_memory(num_host_pages: int, gives_way: bool) -> None:
    """`low` has three pages when `high` comes, which waits if they cannot be kept."""
    config = small_config(
        policy="priority", deterministic=True, page_size=4, prefill_chunk_tokens=4, max_num_seqs=1
    )
    driver = Driver(config, 20, max_host_pages=num_host_pages)
    low, high = state("low", 8, 9), state("high", 3, 2)
    high.request = request("high", [1] * 3, priority=9)
    driver.add(low)
    for _ in range(4):
        driver.step()
    assert len(low.page_ids) == 3
    driver.add(high)
    driver.step()
    assert ids(driver.scheduler.preempted) == (["low"] if gives_way else [])


def test_a_request_goes_on_in_the_middle_of_its_prompt() -> None:
    """And as a decode row afterwards: never as a chunk of what it had sampled."""
    config = small_config(
        policy="priority", deterministic=True, page_size=4, prefill_chunk_tokens=4, max_num_seqs=1
    )
    driver = Driver(config, 20, max_host_pages=20)
    low, high = state("low", 10, 5), state("high", 3, 2)
    high.request = request("high", [1] * 3, priority=9)
    driver.add(low)
    assert chunks(driver.step()) == [("low", 0, 4)]
    driver.add(high)
    schedule = driver.step()
    assert ids(driver.scheduler.preempted) == ["low"]
    assert chunks(schedule) == [("high", 0, 3)]
    while driver.scheduler.live:
        schedule = driver.step()
        if schedule.chunks:
            break
    assert chunks(schedule) == [("low", 4, 4)]
    assert [chunk.is_insert for chunk in schedule.chunks] == [True]
    assert chunks(driver.step()) == [("low", 8, 2)]
    another = state("another", 2, 1)
    another.request = request("another", [1] * 2, priority=9)
    driver.step()
    driver.add(another)
    schedule = driver.step()
    assert ids(driver.scheduler.preempted) == ["low"]
    while not schedule.inserts:
        schedule = driver.step()
    assert ids(schedule.inserts) == ids(schedule.decodes) == ["low"]
    assert not schedule.chunks


@pytest.mark.parametrize(("page_size", "chunk"), [(1, n) for n in range(1, 10)] + [(4, 4), (3, 6)])
def test_no_more_come_back_in_a_step_than_it_has_slot_rows(page_size: int, chunk: int) -> None:
    """They bring no prompt tokens, so where chunks are short it is not those that run out first."""
    config = small_config(
        policy="priority",
        deterministic=True,
        page_size=page_size,
        prefill_chunk_tokens=chunk,
        max_num_seqs=12,
    )
    num_pages = 144 // page_size
    engine, executor = fake_engine(config, num_pages + 1, max_host_pages=2 * num_pages)
    made: list[Schedule] = []
    vars(engine._scheduler)["schedule"] = recorded(engine._scheduler.schedule, made)
    small = [request(f"r{number}", (1, number), max_tokens=9) for number in range(11)]
    large = request("large", [3] * 140, max_tokens=2, priority=9)
    answers: dict[str, Answer] = {}
    for one in small:
        add_request(engine, one)
    while len(answers) < len(small):
        step(engine, answers)
    add_request(engine, large)
    finish(engine, answers)
    assert answers == {
        one.request_id: run_alone(one, config, engine.limits) for one in [*small, large]
    }
    assert max(len(each.inserts) for each in made) == executor.keys[0].segments


def recorded(
    make: Callable[[float], Schedule | None], made: list[Schedule]
) -> Callable[[float], Schedule | None]:
    """The same, and what it makes is kept."""

    def schedule(now_s: float) -> Schedule | None:
        step = make(now_s)
        made.extend([] if step is None else [step])
        return step

    return schedule


def test_a_page_may_come_back_for_two_before_a_step_is_made() -> None:
    """`first` comes back and waits for its mask, so nothing is dispatched; it is cancelled, and
    `second` comes back into the same page.
    """
    config = small_config(policy="priority", deterministic=True, max_num_seqs=1)
    guides = HeldGuides()
    engine, executor = fake_engine(config, max_host_pages=60, guides=guides)
    imported: list[int] = []
    import_pages = executor.import_pages

    def watch(pairs: Sequence[tuple[int, int]]) -> None:
        imported.extend(page for _, page in pairs)
        import_pages(pairs)

    vars(executor)["import_pages"] = watch
    answers: dict[str, Answer] = {}
    second = request("second", (1, 2), max_tokens=9)
    add_request(engine, second)
    while not answers:
        step(engine, answers)
    guides.may_go_on.set()
    options = {"guide": guide(4), "min_tokens": 9, "max_tokens": 9, "ignore_eos": False}
    add_request(engine, request("first", (3, 4), priority=1, **options))
    engine._guides.wait(10.0)
    guides.may_go_on.clear()
    while "first" not in answers:
        collect(engine.step(), answers)
    add_request(engine, request("short", (5, 6), max_tokens=1, priority=2))
    while engine._in_flight is not None or "short" not in answers:
        collect(engine.step(), answers)
    assert ids(engine._scheduler.running) == ["first"]
    engine.abort("first")
    guides.may_go_on.set()
    finish(engine, answers)
    assert answers["second"] == run_alone(second, config, engine.limits)
    assert len(imported) == 2
    assert len(set(imported)) == 1, "not what this is for"


def test_who_comes_back_is_told_apart_from_who_reads_the_cache() -> None:
    """It computes nothing twice, but nothing of that was cached, and it missed nothing."""
    config = small_config(
        policy="priority", deterministic=True, page_size=4, prefill_chunk_tokens=4, max_num_seqs=1
    )
    driver = Driver(config, 20, max_host_pages=20)
    low, high = state("low", 8, 9), state("high", 5, 2)
    high.request = request("high", [1] * 5, priority=9)
    driver.add(low)
    events = [*driver.step().events, *driver.step().events]
    driver.add(high)
    while driver.scheduler.live:
        events += driver.step().events
    admitted = [event for event in events if event.kind is EventKind.ADMITTED]
    assert [event.request_id for event in admitted] == ["low", "high", "low"]
    told = [
        (event.detail["cached_tokens"], event.detail["imported_pages"], event.detail.get("miss"))
        for event in admitted
    ]
    assert told == [(0, 0, "unseen"), (4, 0, "page_border"), (0, 2, None)]
    assert driver.scheduler.cached_tokens_total == 4


def test_outputs_are_not_published() -> None:
    """Their KV came from decode rows, and a prompt's comes from chunks: other bits."""
    for deterministic in (False, True):
        config = small_config(deterministic=deterministic, page_size=4, prefill_chunk_tokens=4)
        engine, _ = fake_engine(config)
        add_request(engine, request("a", range(10), max_tokens=9))
        first = finish(engine)["a"]
        add_request(engine, request("b", (*range(10), *first.token_ids), max_tokens=1))
        second = finish(engine)["b"]
        assert second.num_cached_tokens == (8 if deterministic else 16)

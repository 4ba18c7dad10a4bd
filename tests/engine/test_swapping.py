"""A deterministic engine: whoever is preempted keeps its KV, and nothing is computed twice.

On a fake device whose next token is a hash of what it reads through the page tables, so a page that
does not come back, or comes back to another place, is a wrong answer.
"""

import random
from collections import Counter

import pytest

from octavo.configs.scheduling_config import PolicyName
from octavo.engine.engine import Engine
from octavo.engine.request import Request
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.engine.schedule import RequestState, Schedule
from octavo.engine.swap_reserve import SwapReserve
from octavo.engine.swapping import Swapping

from .fakes import (
    Answer,
    Clock,
    add_request,
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


def test_a_chunk_that_samples_waits_whole_for_its_mask() -> None:
    """Breaks if what needs no mask goes ahead: the rest would be computed at another place."""
    config = small_config(deterministic=True, page_size=4, prefill_chunk_tokens=4)
    scheduler = Driver(config, 20).scheduler
    guide = Guide(kind=GuideKind.REGEX, text="1")
    one = RequestState(request=request("a", [1] * 7, guide=guide), max_tokens=3, stop_ids=())
    scheduler.add(one)
    first = scheduler.schedule(0.0)
    assert first is not None
    assert chunks(first) == [("a", 0, 4)]
    assert scheduler.schedule(1.0) is None
    scheduler.take_mask(one)
    second = scheduler.schedule(2.0)
    assert second is not None
    assert chunks(second) == [("a", 4, 3)]


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


@pytest.mark.parametrize("seed", range(50))
def test_a_victim_always_finds_room(seed: int) -> None:
    """The proof of SwapReserve, tried: whoever is admitted, and however they grow."""
    rng = random.Random(seed)
    num_device, num_host = rng.randint(1, 12), rng.randint(0, 20)
    reserve = SwapReserve(num_device, num_host)
    most: dict[RequestState, int] = {}
    held: dict[RequestState, int] = {}
    swapped: dict[RequestState, int] = {}
    for number in range(200):
        pages = rng.randint(1, num_device)
        if reserve.admits(pages):
            one = state(f"r{number}", 1, 1)
            reserve.enter(one, pages)
            most[one], held[one] = pages, 0
        else:
            with pytest.raises(ValueError, match="reserve"):
                reserve.enter(state("late", 1, 1), pages)
        growing = [one for one in held if held[one] < most[one]]
        if growing:
            one = rng.choice(growing)
            while sum(held.values()) == num_device:
                victim = rng.choice([other for other in held if held[other]])
                swapped[victim] = held.pop(victim)
                assert sum(swapped.values()) <= num_host, "no room for a victim"
            if one in held:
                held[one] += 1
        for back in rng.sample(list(swapped), len(swapped)):
            if swapped[back] + sum(held.values()) < num_device:
                held[back] = swapped.pop(back)
        done = [one for one in held if held[one] == most[one] and rng.random() < 0.3]
        for one in done:
            reserve.leave(one)
            del held[one], most[one]
        reserve.check()

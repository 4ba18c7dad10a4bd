"""Cancelled at any moment, a request leaves nothing behind and its neighbours notice nothing.

What would break this: a page or slot that waits for a step in flight, a late result that reaches
the slot's next owner, a record that is kept per request.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from octavo.engine.engine import Engine
from octavo.engine.engine_thread import EngineThread
from octavo.engine.request import FinishReason, Request, RequestOutput

from .conftest import Model
from .fakes import Answer, add_request, collect, finish, request, step
from .naive import NaiveRun, assert_agrees, generate

NUM_NEIGHBOURS = 24

# These run thousands of steps, and checking annotations would be most of the time.
pytestmark = pytest.mark.usefixtures("types_unchecked")


def _random_request(rng: random.Random, name: str, **sampling: Any) -> Request:
    drawn = {"temperature": 0.8, "seed": rng.randrange(2**64), "top_p": 0.95}
    return request(
        name,
        rng.choices(range(320), k=rng.choice([1, 5, rng.randint(1, 60)])),
        max_tokens=rng.choice([1, 2, 5, rng.randint(1, 20)]),
        **(drawn if rng.random() < 0.5 else {}),
        **sampling,
    )


@pytest.fixture(scope="module")
def neighbours(tiny_model: Model) -> list[tuple[Request, NaiveRun]]:
    """Requests that run to their ends, and what they get when nobody disturbs them."""
    rng = random.Random(1)
    requests = [
        _random_request(rng, f"neighbour {n}", logprobs=True) for n in range(NUM_NEIGHBOURS)
    ]
    return [
        (one, generate(tiny_model.decoder, one.prompt_token_ids, one.sampling, eos_token_ids=()))
        for one in requests
    ]


def _renamed(one: Request, name: str) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=one.prompt_token_ids,
        sampling=one.sampling,
        arrival_s=one.arrival_s,
    )


def _assert_undisturbed(
    answers: dict[str, Answer], expected: dict[str, tuple[Request, NaiveRun]]
) -> None:
    num_close_calls = sum(
        assert_agrees(answers[name], run, one.sampling) for name, (one, run) in expected.items()
    )
    assert num_close_calls <= len(expected) // 10, "too many close calls to be rounding"


def _moment(engine: Engine, name: str) -> str:
    """Where a live request is."""
    scheduler = engine._scheduler
    state = scheduler.live[name]
    if state in scheduler.waiting:
        return "queued"
    if state in scheduler.ending or state.num_sampled == state.max_tokens:
        return "last token"
    return "prefill" if state.is_prefilling else "decode"


def test_a_thousand_cancellations(tiny_engine: Engine, neighbours: list[tuple[Request, NaiveRun]]):
    """In every step the invariants of slots and pages are checked (fakes.step)."""
    rng = random.Random(0)
    answers: dict[str, Answer] = {}
    expected: dict[str, tuple[Request, NaiveRun]] = {}
    moments: Counter[str] = Counter()
    resident_bytes: list[int] = []
    victims: list[str] = []
    num_added = 0
    while moments.total() < 1000:
        num_added += 1
        if rng.random() < 0.3:
            one, run = rng.choice(neighbours)
            name = f"neighbour {num_added}"
            add_request(tiny_engine, _renamed(one, name))
            expected[name] = one, run
        else:
            victims.append(f"victim {num_added}")
            add_request(tiny_engine, _random_request(rng, victims[-1]))
        for _ in range(rng.choice([0, 0, 1, 3, 6])):
            step(tiny_engine, answers)
        victims = [name for name in victims if name in tiny_engine._scheduler.live]
        rng.shuffle(victims)
        while len(victims) > 5 or (victims and rng.random() < 0.5):
            name = victims.pop()
            state = tiny_engine._scheduler.live.get(name)
            if state is None:  # it ended while others were cancelled
                continue
            moments[_moment(tiny_engine, name)] += 1
            num_free = tiny_engine.load().num_free_pages
            num_held = len(state.page_ids)
            assert tiny_engine.abort(name)
            # Before the next step is even scheduled, and whatever is in flight.
            assert tiny_engine.load().num_free_pages == num_free + num_held
            assert state.slot is None
            tiny_engine.check()
            step(tiny_engine, answers)
            assert answers[name].finish_reason is FinishReason.CANCELLED
            resident_bytes.append(psutil.Process().memory_info().rss)
    finish(tiny_engine, answers)
    load = tiny_engine.load()
    assert load.num_free_pages == load.num_usable_pages
    assert load.num_running == load.num_queued == 0
    _assert_undisturbed(answers, expected)
    assert len(expected) > 100
    assert min(moments[name] for name in ("queued", "prefill", "decode", "last token")) > 30
    assert resident_bytes[999] - resident_bytes[199] <= 20 * 2**20


def _start(engine: Engine, on_outputs: Callable[[list[RequestOutput]], None]) -> EngineThread:
    thread = EngineThread(engine, on_outputs, time.monotonic)
    thread.start()
    return thread


def test_cancellations_from_another_thread(
    tiny_engine: Engine, neighbours: list[tuple[Request, NaiveRun]]
):
    """At moments that nobody chooses: every stream ends, and the neighbours' are complete."""
    rng = random.Random(2)
    answers: dict[str, Answer] = {}
    changed = threading.Condition()

    def on_outputs(outputs: list[RequestOutput]) -> None:
        with changed:
            collect(outputs, answers)
            changed.notify_all()

    thread = _start(tiny_engine, on_outputs)
    expected: dict[str, tuple[Request, NaiveRun]] = {}
    victims: list[str] = []
    for number in range(300):
        if number % 3 == 0:
            one, run = rng.choice(neighbours)
            expected[f"neighbour {number}"] = one, run
            thread.submit(_renamed(one, f"neighbour {number}"))
        else:
            victims.append(f"victim {number}")
            thread.submit(_random_request(rng, victims[-1]))
            # Sooner or later, some before they are even looked at, some when they have ended.
            for name in rng.sample(victims, k=min(len(victims), 2)):
                thread.abort(name)
        if number % 10 == 0:
            with changed:
                changed.wait(0.01)
    for name in victims:
        thread.abort(name)
    with changed:
        all_names = {*victims, *expected}
        assert changed.wait_for(
            lambda: all_names == {n for n, one in answers.items() if one.finish_reason}, 60.0
        )
    load = thread.load()
    thread.stop()
    assert thread.join(10.0)
    assert load.num_free_pages == load.num_usable_pages
    assert load.num_running == load.num_queued == 0
    assert answers.keys() == {*victims, *expected}
    reasons = {answers[name].finish_reason for name in victims}
    assert reasons <= {FinishReason.CANCELLED, FinishReason.LENGTH}
    assert FinishReason.CANCELLED in reasons
    _assert_undisturbed(answers, expected)

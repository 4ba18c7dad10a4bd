"""Several choices of one request: forks that share its prompt's pages, each with its own output."""

import threading
from typing import Any

import numpy as np
import pytest

from octavo.engine.admission import choice_id
from octavo.engine.engine_thread import EngineThread
from octavo.engine.packing import SEGMENT_LENGTH, SEGMENT_SLOT, UploadLayout
from octavo.engine.refusals import InvalidRequest, Overloaded
from octavo.engine.request import FinishReason, RequestOutput

from .fakes import (
    Answer,
    Clock,
    FakeExecutor,
    add_request,
    fake_engine,
    finish,
    request,
    run_alone,
    small_config,
    step,
)

PROMPT = tuple(range(1, 22))  # five pages of 4, and one token


def num_chunk_tokens(executor: FakeExecutor) -> int:
    """Prompt tokens that all steps computed."""
    config, total = executor.config, 0
    for key, upload in zip(executor.keys, executor.uploads, strict=True):
        layout = UploadLayout(key, config.max_num_seqs, config.page_size, config.max_stop_ids, 2)
        segments = layout.split(np.frombuffer(upload, np.int32))["segments"]
        used = segments[:, SEGMENT_SLOT] < config.max_num_seqs
        total += int(segments[used, SEGMENT_LENGTH].sum())
    return total


@pytest.mark.parametrize(
    ("prefix_cache", "options"),
    [
        (True, {}),
        (True, {"reads_prefix_cache": False}),
        (True, {"prompt_logprobs": True, "logprobs": True}),
        (False, {}),
    ],
)
def test_choices_share_the_pages_of_the_prompt(prefix_cache: bool, options: dict[str, Any]):
    """Fails if a fork computes what choice 0 has computed, whatever the request may read."""
    engine, executor = fake_engine(small_config(prefix_cache=prefix_cache))
    one = request("a", PROMPT, n=3, max_tokens=6, temperature=1.0, seed=5, **options)
    add_request(engine, one)
    answers = finish(engine)
    assert answers == {
        choice_id("a", choice): run_alone(one, engine.config, engine.limits, choice)
        for choice in range(3)
    }
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 3
    assert num_chunk_tokens(executor) == len(PROMPT) + 2
    load = engine.load()
    assert (load.prompt_tokens_total, load.cached_tokens_total) == (3 * len(PROMPT), 40)
    assert load.prompt_tokens_total - load.cached_tokens_total == num_chunk_tokens(executor)
    assert load.finished_total[FinishReason.LENGTH] == 3


@pytest.mark.parametrize("options", [{"reads_prefix_cache": False}, {"prompt_logprobs": True}])
def test_a_request_that_reads_no_cache_shares_with_itself_alone(options: dict[str, Any]):
    """Its pages are found neither by the next request with its id nor through anything else."""
    engine, executor = fake_engine()
    one = request("a", PROMPT, n=2, max_tokens=2, **options)
    for _ in range(2):
        add_request(engine, one)
        finish(engine)
    assert num_chunk_tokens(executor) == 2 * (len(PROMPT) + 1)


def test_choices_draw_from_one_seed_and_their_number():
    """Also where the engine picks the seed: choice 0 is what it would be alone."""
    tokens: list[list[int]] = []
    for n in (1, 3):
        engine, _ = fake_engine()
        add_request(engine, request("a", PROMPT, n=n, max_tokens=6, temperature=1.0))
        tokens.append(finish(engine)["a"].token_ids)
    assert tokens[0] == tokens[1]


def test_one_choice_ends_and_the_others_go_on():
    engine, _ = fake_engine()
    one = request("a", PROMPT, n=3, max_tokens=20, temperature=1.0, seed=5)
    add_request(engine, one)
    answers: dict[str, Answer] = {}
    while len(answers) < 3:
        step(engine, answers)
    assert engine.abort("a", FinishReason.STOP, choice=1)
    assert not engine.abort("a", FinishReason.STOP, choice=1), "it has ended"
    finish(engine, answers)
    assert answers[choice_id("a", 1)].finish_reason is FinishReason.STOP
    for choice in (0, 2):
        expected = run_alone(one, engine.config, engine.limits, choice)
        assert answers[choice_id("a", choice)] == expected


@pytest.mark.parametrize("choice", [None, 0])
def test_whoever_ends_before_the_prompt_is_computed_takes_the_others_along(choice: int | None):
    """They were in no queue; all get their last output."""
    engine, _ = fake_engine()
    add_request(engine, request("a", PROMPT, n=3))
    answers: dict[str, Answer] = {}
    step(engine, answers)
    assert engine.abort("a", choice=choice)
    finish(engine, answers)
    assert [answer.finish_reason for answer in answers.values()] == [FinishReason.CANCELLED] * 3
    assert engine.load().finished_total[FinishReason.CANCELLED] == 3
    assert not list(engine._choices)


def test_a_fork_may_end_before_it_begins():
    engine, _ = fake_engine()
    one = request("a", PROMPT, n=3, max_tokens=4, temperature=1.0, seed=1)
    add_request(engine, one)
    assert engine.abort("a", choice=2)
    answers = finish(engine)
    assert answers[choice_id("a", 2)].finish_reason is FinishReason.CANCELLED
    for choice in (0, 1):
        expected = run_alone(one, engine.config, engine.limits, choice)
        assert answers[choice_id("a", choice)] == expected


def test_an_engine_that_fails_ends_every_choice():
    engine, executor = fake_engine()
    executor.fail_fetch.add(1)
    add_request(engine, request("a", PROMPT, n=3))
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    ends = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
    assert sorted(output.choice for output in ends) == [0, 1, 2]


def test_a_deadline_ends_every_choice():
    clock = Clock()
    engine, _ = fake_engine(clock=clock)
    add_request(engine, request("a", PROMPT, n=3, deadline_s=5.0))
    answers: dict[str, Answer] = {}
    step(engine, answers)
    clock.now_s = 6.0
    finish(engine, answers)
    assert [answer.finish_reason for answer in answers.values()] == [FinishReason.DEADLINE] * 3


def test_forks_do_not_wait_in_vain():
    """Their time to wait is their request's, and that had its slot in time."""
    clock = Clock()
    engine, _ = fake_engine(clock=clock)
    one = request("a", PROMPT, n=2, max_tokens=4, queue_ttl_s=0.5)
    add_request(engine, one)
    answers: dict[str, Answer] = {}
    while engine.has_work:
        step(engine, answers)
        clock.now_s += 0.4
    for choice in range(2):
        expected = run_alone(one, engine.config, engine.limits, choice)
        assert answers[choice_id("a", choice)] == expected


def thread_of(outputs: list[RequestOutput], **changes: Any) -> EngineThread:
    """Not started: what is submitted waits."""
    engine, _ = fake_engine(small_config(**changes))
    return EngineThread(engine, outputs.extend, Clock())


def test_each_choice_counts_as_a_request():
    thread = thread_of([], max_num_queued=3)
    thread.submit(request("a", n=4))
    thread.submit(request("b", n=2))
    with pytest.raises(Overloaded, match="6 requests are live"):
        thread.submit(request("c", n=2))
    assert thread.load().num_queued == 6


@pytest.mark.parametrize(
    ("changes", "n", "message"),
    [
        ({"max_num_queued": 3}, 8, r"n is 8; it must be at most max_num_seqs \+ max_num_queued, 7"),
        ({"max_tenant_queued": 2}, 3, "n is 3; it must be at most max_tenant_queued, 2"),
        ({"max_tenant_tokens": 50}, 4, "max_tokens is 10; it must be at most 9: .* n is 4"),
        ({}, 129, r"n is 129; it must be in \[1, 128\]"),
        ({}, 0, r"n is 0; it must be in \[1, 128\]"),
    ],
)
def test_choices_that_no_waiting_lets_in_are_refused(changes: dict[str, Any], n: int, message: str):
    """Kind 11.3."""
    with pytest.raises(InvalidRequest, match=message):
        thread_of([], **changes).submit(request("a", n=n, max_tokens=10))


def test_an_id_is_taken_as_long_as_any_choice_lives():
    has_ended, may_go_on = threading.Event(), threading.Event()

    def take(outputs: list[RequestOutput]) -> None:
        if any(output.finish_reason for output in outputs):
            has_ended.set()
            assert may_go_on.wait(10)
        else:
            thread.abort("a", FinishReason.STOP, choice=0)

    thread = EngineThread(fake_engine()[0], take, Clock())
    thread.submit(request("a", PROMPT, n=2, max_tokens=200))
    thread.start()
    assert has_ended.wait(10), "choice 0 goes on"
    with pytest.raises(InvalidRequest, match="a request with it is live"):
        thread.submit(request("a"))
    may_go_on.set()
    thread.stop()
    assert thread.join(10.0)


@pytest.mark.parametrize("request_id", ["a\x1f1", "a\nb", "\x00"])
def test_an_id_holds_no_control_characters(request_id: str):
    """It would pass for a choice of another request, or for two lines of a log."""
    with pytest.raises(InvalidRequest, match="request_id"):
        thread_of([]).submit(request(request_id))

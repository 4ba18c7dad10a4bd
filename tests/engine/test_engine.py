"""Every request gets the tokens of its run alone, whatever runs beside it, ends, or is pushed out.

The device is `FakeExecutor`, whose next token depends on the whole history read through the page
table; `run_alone` is the oracle.
"""

import itertools
import random

import numpy as np
import pytest

from octavo.engine import packing
from octavo.engine.engine import Engine
from octavo.engine.refusals import InvalidRequest
from octavo.engine.request import FinishReason, Request, RequestOutput
from octavo.engine.request_progress import Progress, ProgressKind

from .fake_model import EOS, VOCAB_SIZE, next_token
from .fakes import (
    Answer,
    Clock,
    FakeExecutor,
    add_request,
    collect,
    fake_engine,
    finish,
    request,
    run_alone,
    small_config,
    step,
)


def _expected(engine: Engine, wanted: Request) -> Answer:
    return run_alone(wanted, engine.config, engine.limits)


def _long(request_id: str, num_prompt: int = 6, max_tokens: int = 40) -> Request:
    return request(request_id, range(num_prompt), max_tokens=max_tokens)


@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_tokens_do_not_depend_on_chunk_and_page_size(chunk: int, page_size: int):
    config = small_config(prefill_chunk_tokens=chunk, page_size=page_size)
    engine, _ = fake_engine(config, num_pages=100)
    wanted = [request(f"r{n}", range(n), max_tokens=n, logprobs=True) for n in (1, 2, 7, 16, 33)]
    for one in wanted:
        add_request(engine, one)
    answers = finish(engine)
    assert answers == {one.request_id: _expected(engine, one) for one in wanted}


def _random_request(rng: random.Random, request_id: str, max_model_len: int) -> Request:
    num_prompt = rng.randint(1, min(40, max_model_len - 1))
    return request(
        request_id,
        rng.choices(range(VOCAB_SIZE), k=num_prompt),
        max_tokens=rng.choice([None, rng.randint(1, max_model_len - num_prompt)]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(2**64),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=tuple(rng.choices(range(VOCAB_SIZE), k=rng.choice([0, 0, 1, 2]))),
        logprobs=rng.random() < 0.5,
        prompt_logprobs=rng.random() < 0.5,
    )


def _random_run(seed: int) -> tuple[Engine, FakeExecutor]:
    """Random sizes, arrivals, aborts and far too few pages; all answers are compared."""
    rng = random.Random(seed)
    config = small_config(
        max_num_seqs=rng.randint(1, 9),
        prefill_chunk_tokens=rng.randint(1, 16),
        page_size=rng.randint(1, 5),
        max_num_queued=20,
    )
    engine, executor = fake_engine(config, num_pages=rng.randint(8, 24))
    answers: dict[str, Answer] = {}
    wanted: dict[str, Request] = {}
    for number in range(60):
        if rng.random() < 0.5 and len(wanted) < 20:
            one = _random_request(rng, f"r{number}", engine.limits.max_model_len)
            wanted[one.request_id] = one
            add_request(engine, one)
        if wanted and rng.random() < 0.06:
            engine.abort(rng.choice(list(wanted)))
        step(engine, answers)
    finish(engine, answers)
    for request_id, one in wanted.items():
        answer, expected = answers[request_id], _expected(engine, one)
        if answer.finish_reason is FinishReason.CANCELLED:
            num_tokens = len(answer.token_ids)
            assert answer.token_ids == expected.token_ids[:num_tokens]
            assert answer.logprobs == expected.logprobs[:num_tokens]
            scored = answer.prompt_logprobs
            assert scored == expected.prompt_logprobs[: len(scored)]
        else:
            assert answer == expected
    load = engine.load()
    assert load.num_free_pages == load.num_usable_pages
    assert load.num_running == load.num_queued == 0
    assert sum(load.finished_total.values()) == len(wanted)
    return engine, executor


def test_random_load_gives_every_request_the_tokens_of_its_run_alone():
    """Also that the runs did what they are for: preempt, abort, stop, reach the limit."""
    engines = [_random_run(seed)[0] for seed in range(8)]
    loads = [engine.load() for engine in engines]
    assert sum(load.preemptions_total for load in loads) > 10
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED):
        assert sum(load.finished_total[reason] for load in loads) > 5, reason


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 400))
def test_random_load_at_length(seed: int):
    _random_run(seed)


def test_two_engines_with_the_same_history_upload_the_same_bytes():
    """Kind 5.6: ranks that plan for themselves must plan the same."""
    (_, first), (_, second) = _random_run(3), _random_run(3)
    assert first.uploads == second.uploads


def test_a_step_is_dispatched_before_the_one_before_it_is_read():
    """Fails if the host reads a result while the device has nothing to do."""
    engine, executor = fake_engine()
    for number in range(6):
        add_request(engine, _long(f"r{number}", num_prompt=11, max_tokens=7))
    finish(engine)
    last = executor.log[-1][1]
    for number in range(last):
        dispatched = executor.log.index(("dispatch", number + 1))
        assert dispatched < executor.log.index(("fetch", number))


def test_a_preempted_request_continues_where_it_was():
    """Preempted while it decodes: nothing is given twice, prompt log-probabilities included."""
    engine, _ = fake_engine(small_config(max_num_seqs=2), num_pages=12)
    wanted = [
        request(f"r{n}", range(9), max_tokens=24, logprobs=True, prompt_logprobs=True, seed=n)
        for n in range(2)
    ]
    outputs: list[RequestOutput] = []
    for one in wanted:
        add_request(engine, one)
    while engine.has_work:
        outputs += engine.step()
        engine.check()
    answers: dict[str, Answer] = {}
    collect(outputs, answers)
    assert answers == {one.request_id: _expected(engine, one) for one in wanted}
    preemptions = {o.request_id: o.num_preemptions for o in outputs if o.timings is not None}
    assert preemptions["r0"] == 0
    assert preemptions["r1"] > 0
    assert engine.load().preemptions_total == preemptions["r1"]
    assert engine.load().prompt_tokens_total == 18, "a prompt is counted once"
    assert engine.load().output_tokens_total == 48


def test_admission_is_told_once_of_each_preemption():
    """Also if the engine is paused after it; and what of its tokens is cached comes next."""
    engine, _ = fake_engine(small_config(max_num_seqs=3), num_pages=12)
    for number in range(6):
        add_request(engine, request(f"r{number}", range(number, number + 9), max_tokens=24))
    progress: list[Progress] = []
    while engine.has_work:
        engine.step()
        engine.collect()
        progress += engine.take_progress()
    requeued = [at for at, one in enumerate(progress) if one.kind is ProgressKind.REQUEUED]
    assert len(requeued) == engine.load().preemptions_total > 0
    for at in requeued:
        lost, expected = progress[at : at + 2]
        assert (expected.kind, expected.request_id) == (ProgressKind.EXPECTED, lost.request_id)
        assert expected.num_tokens <= lost.num_tokens


def test_a_prompt_preempted_between_chunks_gives_its_log_probabilities_once():
    """Some were given before `late` lost its slot; its prompt runs again from the start."""
    engine, _ = fake_engine(small_config(max_num_seqs=2, prefill_chunk_tokens=2), num_pages=12)
    early = request("early", range(3), max_tokens=34, seed=1)
    late = request("late", range(30), max_tokens=2, seed=2, prompt_logprobs=True)
    answers: dict[str, Answer] = {}
    add_request(engine, early)
    step(engine, answers)
    add_request(engine, late)
    while engine.load().preemptions_total == 0:
        step(engine, answers)
    assert 0 < len(answers["late"].prompt_logprobs) < 29
    finish(engine, answers)
    assert answers == {one.request_id: _expected(engine, one) for one in (early, late)}


def test_a_result_of_an_earlier_stay_in_a_slot_is_dropped():
    """Today no request comes back while a chunk of it is unread; deeper pipelines would do that."""
    engine, _ = fake_engine(small_config(prefill_chunk_tokens=4))
    add_request(engine, request("a", range(12), max_tokens=2, prompt_logprobs=True))
    engine.step()
    (state,) = engine._scheduler.running
    state.generation += 1
    assert engine.step() == []
    (output,) = engine.step()
    assert output.prompt_logprobs


def _greedy_output(prompt: tuple[int, ...], length: int) -> list[int]:
    history = list(prompt)
    for _ in range(length):
        history.append(next_token(history, None))
    return history[len(prompt) :]


@pytest.mark.parametrize("max_tokens", [3, 4, 9])
def test_the_earliest_of_stop_id_and_limit_ends_the_output(max_tokens: int):
    """Kind 2.6: a stop id in the last allowed place is a stop; one behind it does not count."""
    prompt = (5, 6)
    output = _greedy_output(prompt, 4)
    assert output[3] not in output[:3]
    engine, _ = fake_engine()
    add_request(engine, request("a", prompt, max_tokens=max_tokens, stop_token_ids=(output[3],)))
    answer = finish(engine)["a"]
    if max_tokens == 3:
        assert answer == Answer(token_ids=output[:3], finish_reason=FinishReason.LENGTH)
    else:
        assert answer == Answer(
            token_ids=output, finish_reason=FinishReason.STOP, stop_token_id=output[3]
        )


@pytest.mark.parametrize(("ignore_eos", "ends"), [(False, True), (True, False)])
def test_end_of_sequence_ends_unless_ignored(ignore_eos: bool, ends: bool):
    """Kind 2.4, with a prompt after which the fake model says EOS at once."""
    pairs = itertools.product(range(VOCAB_SIZE), repeat=2)
    prompt = next(pair for pair in pairs if next_token(pair, None) == EOS)
    engine, _ = fake_engine()
    add_request(engine, request("a", prompt, max_tokens=2, ignore_eos=ignore_eos))
    answer = finish(engine)["a"]
    assert (answer.stop_token_id == EOS) is ends
    assert len(answer.token_ids) == (1 if ends else 2)


def test_unseeded_requests_differ_and_repeat():
    """Fails if the seed were constant, or came from anywhere but config and order of arrival."""
    runs = []
    for engine_seed in (0, 0, 1):
        engine, _ = fake_engine(small_config(seed=engine_seed))
        for number in range(3):
            add_request(engine, request(f"r{number}", (1,), max_tokens=8, temperature=1.0))
        runs.append([answer.token_ids for answer in finish(engine).values()])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for run in (runs[0], runs[2]) for tokens in run}) == 6


def test_a_decode_row_is_in_every_step_beside_a_long_prompt():
    """Kind 5.5: a prompt of 50 chunks; a stream that runs; a short prompt behind the long one."""
    engine, _ = fake_engine(num_pages=200)
    answers: dict[str, Answer] = {}
    add_request(engine, request("stream", (1,), max_tokens=70))
    step(engine, answers)
    step(engine, answers)
    add_request(engine, request("long", [n % 9 for n in range(400)], max_tokens=2))
    first_tokens: dict[str, int] = {}
    for number in range(60):
        if number == 3:
            add_request(engine, request("short", (2, 3), max_tokens=2))
        outputs = engine.step()
        brought = {output.request_id for output in outputs if output.token_ids}
        assert "stream" in brought, "a step without a token for what decodes"
        for request_id in brought:
            first_tokens.setdefault(request_id, number)
    assert first_tokens["long"] == 51
    assert first_tokens["short"] <= 6, "the short one waits for the whole of the long one"


def test_a_request_larger_than_the_pool_is_refused_and_others_proceed():
    """Kind 5.1: queued, it would wait at the head for ever."""
    engine, _ = fake_engine(num_pages=9)  # 32 tokens, and the last one of an output
    with pytest.raises(InvalidRequest, match="prompt_token_ids is 33"):
        add_request(engine, request("prompt", [1] * 33, max_tokens=1))
    with pytest.raises(InvalidRequest, match="max_tokens is 31"):
        add_request(engine, request("growth", [1] * 3, max_tokens=31))
    wanted = [request("all", [1] * 3, max_tokens=30), *(_long(f"r{n}", 5, 5) for n in range(5))]
    for one in wanted:
        add_request(engine, one)
    assert finish(engine) == {one.request_id: _expected(engine, one) for one in wanted}


def test_cancelling_everything_leaves_an_engine_that_answers():
    """Kind 6.7: fill slots, pages and queue, cancel all at once, probe; five times."""
    engine, _ = fake_engine(num_pages=12)
    for round_number in range(5):
        answers: dict[str, Answer] = {}
        for number in range(20):
            add_request(engine, _long(f"r{number}", max_tokens=30))
        for _ in range(5 + round_number):
            step(engine, answers)
        for number in range(20):
            assert engine.abort(f"r{number}")
            assert not engine.abort(f"r{number}"), "an abort must be idempotent"
        probe = _long("probe", max_tokens=12)
        add_request(engine, probe)
        finish(engine, answers)
        assert answers["probe"] == _expected(engine, probe)
        reasons = {a.finish_reason for name, a in answers.items() if name != "probe"}
        assert reasons == {FinishReason.CANCELLED}
        assert engine.load().num_free_pages == 11


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6], ids=["queued", "prefill", "prefill", "decode"])
def test_an_abort_frees_everything_before_the_next_step(num_steps: int):
    """Kind 6.1."""
    engine, executor = fake_engine()
    add_request(engine, _long("a", num_prompt=20))
    for _ in range(num_steps):
        engine.step()
    num_dispatched = len(executor.keys)
    engine.abort("a")
    assert engine.load().num_free_pages == engine.load().num_usable_pages
    (last,) = engine.step()
    assert last.finish_reason is FinishReason.CANCELLED
    assert len(executor.keys) == num_dispatched
    assert not engine.has_work


def test_a_late_result_never_reaches_a_new_request_with_the_same_id():
    """One behind: the step in flight carries tokens of the request that was aborted."""
    engine, _ = fake_engine()
    answers: dict[str, Answer] = {}
    add_request(engine, request("a", (1, 2), max_tokens=20))
    for _ in range(4):
        step(engine, {})
    engine.abort("a")
    again = request("a", (3, 4), max_tokens=20)
    add_request(engine, again)
    (cancelled,) = engine.step()
    assert cancelled.finish_reason is FinishReason.CANCELLED
    assert cancelled.token_ids == ()
    assert finish(engine, answers)["a"] == _expected(engine, again)


@pytest.mark.parametrize("num_steps", [0, 1, 5], ids=["queued", "prefill", "decode"])
def test_a_deadline_ends_a_request_in_any_phase(num_steps: int):
    clock = Clock()
    engine, _ = fake_engine(clock=clock)
    answers: dict[str, Answer] = {}
    add_request(engine, request("a", range(12), max_tokens=20, deadline_s=5.0))
    add_request(engine, _long("b"))
    for _ in range(num_steps):
        step(engine, answers)
    clock.now_s = 5.0
    step(engine, answers)
    assert answers["a"].finish_reason is FinishReason.DEADLINE
    assert finish(engine, answers)["b"] == _expected(engine, _long("b"))


def test_a_deadline_is_never_reported_as_the_limit():
    """The last token is in flight when the deadline passes."""
    clock = Clock()
    engine, _ = fake_engine(clock=clock)
    add_request(engine, request("a", max_tokens=1, deadline_s=1.0))
    engine.step()
    clock.now_s = 1.0
    (last,) = engine.step()
    assert last.finish_reason is FinishReason.DEADLINE


def test_timings_are_in_order_and_on_the_engines_clock():
    clock = Clock()
    engine, _ = fake_engine(clock=clock)
    add_request(engine, request("a", range(12), max_tokens=2))
    last: list[RequestOutput] = []
    while engine.has_work:
        clock.now_s += 1
        last = engine.step() or last
    timings = last[-1].timings
    assert timings is not None
    # Two chunks and a decode row are dispatched at 1, 2 and 3, each read a step later.
    assert (timings.arrival_s, timings.admitted_s) == (0.0, 1.0)
    assert (timings.first_token_s, timings.finished_s) == (3.0, 4.0)


@pytest.mark.parametrize("kind", ["dispatch", "fetch"])
@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_step_that_fails_ends_all_requests_and_the_engine(kind: str, number: int):
    """Device state is donated, so nothing can run after it; nobody may wait for ever."""
    engine, executor = fake_engine()
    (executor.fail_dispatch if kind == "dispatch" else executor.fail_fetch).add(number)
    for name in "abcdef":
        add_request(engine, _long(name, num_prompt=9))
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
        engine.check()
    collect(outputs, {})
    last = {output.request_id: output for output in outputs if output.finish_reason is not None}
    assert set(last) == set("abcdef")
    assert all(output.finish_reason is FinishReason.ERROR for output in last.values())
    assert all(output.error and "secret" not in output.error for output in last.values())
    assert isinstance(engine.failure, RuntimeError)
    assert engine.load().failed
    assert executor.log[-1] == (kind, number), "the device was used after it failed"
    add_request(engine, _long("g"))
    (late,) = engine.step()
    assert (late.finish_reason, late.error) == (FinishReason.ERROR, "the engine has failed")
    assert executor.log[-1] == (kind, number), "the device was used after it failed"


def test_a_row_that_the_device_dropped_ends_its_own_request_only(
    monkeypatch: pytest.MonkeyPatch,
):
    engine, executor = fake_engine()
    wanted = [_long(name, num_prompt=2, max_tokens=9) for name in "ab"]
    for one in wanted:
        add_request(engine, one)
    fetch = executor.fetch

    def fetch_without_first_row(result: tuple[int, np.ndarray]) -> np.ndarray:
        number, download = result
        if number == 3:
            download[packing.SAMPLE_STATUS] = 0
        return fetch((number, download))

    monkeypatch.setattr(executor, "fetch", fetch_without_first_row)
    answers = finish(engine)
    assert answers["a"].finish_reason is FinishReason.ERROR
    assert answers["a"].token_ids == _expected(engine, wanted[0]).token_ids[:3]
    assert answers["b"] == _expected(engine, wanted[1])

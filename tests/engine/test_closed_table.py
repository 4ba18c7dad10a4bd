"""After it is built, an engine compiles nothing, loses nothing and finishes every stream.

What would break this: an option or a length that changes a shape, a dtype or a tree on the way to
the executable, or an end of a request that forgets what it holds.
"""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from octavo.engine.compilation import compile_events
from octavo.engine.engine import Engine
from octavo.engine.executables import ExecutableTable
from octavo.engine.packing import UploadLayout
from octavo.engine.request import FinishReason, Request
from octavo.engine.step_shapes import StepKey, StepShapes

from .conftest import TINY_ENGINE
from .fakes import Answer, add_request, request, step

NUM_REQUESTS = 1000
MAX_MODEL_LEN = TINY_ENGINE.max_model_len or 0


def _random_request(rng: random.Random, number: int, vocab: int) -> Request:
    longest = MAX_MODEL_LEN - 1
    borders = [n + d for n in (5, 16, 37) for d in (-1, 0, 1)]
    num_prompt = rng.choice([1, longest, *borders, rng.randint(1, longest), rng.randint(1, 30)])
    room = MAX_MODEL_LEN - num_prompt
    few = min(room, rng.choice([1, 2, rng.randint(1, 20)]))  # most are short, or it takes minutes
    return request(
        f"r{number}",
        rng.choices(range(vocab), k=num_prompt),
        arrival_s=0.0,
        max_tokens=few if rng.random() < 0.95 else rng.choice([None, room]),
        temperature=rng.choice([0.0, 0.0, 1e-6, 0.7, 1, 1.0, 100.0]),
        top_k=rng.choice([0, -1, 1, 2, vocab - 1, vocab, vocab + 1, 2**31 - 1]),
        top_p=rng.choice([1.0, 1, 1e-6, 0.9, 0.999999]),
        min_p=rng.choice([0.0, 0, 1e-6, 0.1, 1.0]),
        seed=rng.choice([None, 0, 2**64 - 1, rng.randrange(2**64)]),
        stop_token_ids=tuple(rng.sample(range(vocab), k=rng.choice([0, 0, 0, 1, 4]))),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.random() < 0.3,
        prompt_logprobs=rng.random() < 0.3,
    )


def _assert_complete(one: Request, answer: Answer, eos_token_ids: Sequence[int]) -> None:
    """As many ids as the finish reason says, and everything that was asked for about them."""
    sampling = one.sampling
    room = MAX_MODEL_LEN - len(one.prompt_token_ids)
    most = room if sampling.max_tokens is None else sampling.max_tokens
    stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    match answer.finish_reason:
        case FinishReason.LENGTH:
            assert len(answer.token_ids) == most
            assert not stop_ids & {*answer.token_ids}
        case FinishReason.STOP:
            assert answer.token_ids[-1] == answer.stop_token_id
            assert answer.stop_token_id in stop_ids
            assert not stop_ids & {*answer.token_ids[:-1]}
            assert len(answer.token_ids) <= most
        case FinishReason.CANCELLED:
            assert len(answer.token_ids) < most
        case other:
            raise AssertionError(f"{one.request_id} ended with {other}")
    assert len(answer.logprobs) == (len(answer.token_ids) if sampling.logprobs else 0)
    if not sampling.prompt_logprobs:
        assert not answer.prompt_logprobs
    elif answer.token_ids:
        assert len(answer.prompt_logprobs) == len(one.prompt_token_ids) - 1


@pytest.mark.usefixtures("types_unchecked")  # they would be most of the time
def test_a_thousand_requests_of_every_kind_compile_and_leak_nothing(tiny_engine: Engine):
    engine, before = tiny_engine, tiny_engine.load()
    rng = random.Random(0)
    wanted: dict[str, Request] = {}
    answers: dict[str, Answer] = {}
    num_compiled = compile_events()
    while len(wanted) < NUM_REQUESTS or engine.has_work:
        # Bursts and lulls: idle, one row, full batches, a queue.
        if len(wanted) < NUM_REQUESTS and rng.random() < 0.1:
            for _ in range(rng.choice([1, 1, 2, 5, 40])):
                one = _random_request(rng, len(wanted), engine.limits.vocab_size)
                wanted[one.request_id] = one
                add_request(engine, one)
        if engine.has_work and rng.random() < 0.02:
            engine.abort(rng.choice([*wanted]))
        step(engine, answers)
        num_steps = engine.load().steps_total - before.steps_total
        assert num_steps < 20 * NUM_REQUESTS, "a request does not end"
    assert compile_events() == num_compiled
    load = engine.load()
    assert load.num_free_pages == load.num_usable_pages == TINY_ENGINE.num_pages - 1
    assert load.num_running == load.num_queued == 0
    assert answers.keys() == wanted.keys()
    for name, one in wanted.items():
        _assert_complete(one, answers[name], engine.limits.eos_token_ids)
    # The fuzz reached what it is for.
    assert load.preemptions_total > before.preemptions_total
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED):
        assert load.finished_total[reason] > before.finished_total[reason] + 10, reason


def test_a_key_that_was_not_compiled_is_an_error(tiny_engine: Engine):
    missing = StepKey(rows=3, chunk=16)
    assert missing not in StepShapes.from_config(TINY_ENGINE).all_keys()
    layout = UploadLayout(
        missing, TINY_ENGINE.max_num_seqs, TINY_ENGINE.page_size, TINY_ENGINE.max_stop_ids, 1
    )
    num_compiled = compile_events()
    with pytest.raises(KeyError, match="StepKey\\(rows=3, chunk=16\\) is not among the compiled"):
        tiny_engine._executor.dispatch(missing, np.zeros(layout.size, np.int32))
    assert compile_events() == num_compiled


def test_the_table_holds_what_the_shapes_name(tiny_engine: Engine):
    table = tiny_engine._executor._table
    assert isinstance(table, ExecutableTable)
    keys = StepShapes.from_config(TINY_ENGINE).all_keys()
    assert len(table) == len(keys)
    assert all(callable(table[key]) for key in keys)

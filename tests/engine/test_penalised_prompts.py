"""Kind 3.7: penalties see the same history wherever the prompt's KV comes from.

Held to the naive run, whose penalties count ids of the whole text: cold, cached, after a
preemption, and in chunks of 4 tokens, of which only the last is there when a token is sampled.
"""

from typing import Any

import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.request import Request, RequestOutput

from .conftest import Model
from .fakes import Answer, add_request, collect, finish, request
from .naive import NaiveRun, assert_agrees, generate

# Rare ids, repeated, in the first pages: who counts only what a step computes has them at no time.
PROMPT = (300, 301, 300, 302, 300, *range(40, 60), 7)
NUM_TOKENS = 20
OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.5},  # what was read comes again, and again
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.0},
    {"frequency_penalty": -0.5, "presence_penalty": -0.5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "temperature": 0.8, "seed": 4},
]


@pytest.fixture(scope="module")
def engine(tiny_model: Model) -> Engine:
    return tiny_model.build(
        EngineConfig(
            dtype="float32",
            max_num_seqs=3,
            prefill_chunk_tokens=4,
            page_size=4,
            num_pages=24,
            max_model_len=90,
        )
    )


@pytest.fixture(scope="module")
def plain(tiny_model: Model) -> NaiveRun:
    return naive(tiny_model, penalised({}, "plain"))


def penalised(options: dict[str, Any], salt: str) -> Request:
    return request("a", PROMPT, max_tokens=NUM_TOKENS, cache_salt=salt, **options)


def naive(model: Model, one: Request) -> NaiveRun:
    return generate(model.decoder, one.prompt_token_ids, one.sampling, eos_token_ids=())


def num_output_tokens(outputs: list[RequestOutput]) -> int:
    return sum(len(output.token_ids) for output in outputs if output.request_id == "a")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cold_cached_and_preempted_are_the_naive_run(
    engine: Engine, tiny_model: Model, plain: NaiveRun, options: dict[str, Any]
):
    one = penalised(options, str(options))
    expected = naive(tiny_model, one)
    assert expected.token_ids != plain.token_ids, "a penalty that changes nothing proves nothing"
    answers: list[Answer] = []
    for is_cached in (False, True):
        add_request(engine, one)
        answers.append(finish(engine)["a"])
        assert (answers[-1].num_cached_tokens > 0) is is_cached
    # An earlier one grows until this one must give way, with a part of its output said.
    add_request(engine, request("early", [9, 8, 7] * 16, max_tokens=40))
    add_request(engine, penalised(options, f"preempted {options}"))
    num_said: list[int] = []
    outputs: list[RequestOutput] = []
    while engine.has_work:
        before, num_tokens = engine.load().preemptions_total, num_output_tokens(outputs)
        outputs += engine.step()
        if engine.load().preemptions_total > before:
            num_said.append(num_tokens)
    assert any(0 < number < NUM_TOKENS for number in num_said)
    collected: dict[str, Answer] = {}
    collect(outputs, collected)
    answers.append(collected["a"])
    were_close = [assert_agrees(answer, expected, one.sampling) for answer in answers]
    assert not any(were_close), "choose another prompt"

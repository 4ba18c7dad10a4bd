"""Requests with 32 different sets of options share one batch and one set of executables.

What would break this: an option that reaches a neighbour's row, that stands in the wrong column, or
that needs a program of its own.
"""

import math
import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine.admission import choice_id
from octavo.engine.compilation import compile_events
from octavo.engine.engine import Engine
from octavo.engine.request import FinishReason, Request
from octavo.models.checkpoint import open_checkpoint
from tests.models.tiny_checkpoints import random_tensors, tiny_config, write_huggingface

from .conftest import Model
from .fakes import Answer, add_request, finish, request

DRAWN = {"temperature": 1.0, "seed": 7}

OPTION_SETS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 1},
    {**DRAWN, "top_k": 5},
    {**DRAWN, "top_p": 0.8},
    {**DRAWN, "min_p": 0.2},
    {**DRAWN, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {**DRAWN, "repetition_penalty": 2.0},
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0},
    {**DRAWN, "frequency_penalty": -0.5, "presence_penalty": -0.5},
    {**DRAWN, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"logit_bias": ((5, 100.0),)},
    {"logit_bias": tuple((token_id, -100.0) for token_id in range(0, 300))},
    {**DRAWN, "logit_bias": ((5, 3.0), (6, 2.0), (300, 4.0)), "top_k": 8},
    {"allowed_token_ids": (10, 20, 30, 31, 32, 319)},
    {**DRAWN, "allowed_token_ids": tuple(range(64, 128))},
    {"banned_token_ids": tuple(range(160))},
    {**DRAWN, "banned_token_ids": tuple(range(0, 320, 2)), "top_p": 0.7},
    {"min_tokens": 5, "stop_token_ids": (1, 2, 3), "logit_bias": ((1, 100.0),)},
    {**DRAWN, "min_tokens": 3, "stop_token_ids": tuple(range(100, 104)), "top_k": 20},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 20},
    {**DRAWN, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": True},
    {"prompt_logprobs": True, "prompt_top_logprobs": 5},
    {**DRAWN, "logprobs": True, "prompt_logprobs": True, "prompt_top_logprobs": 20},
    {**DRAWN, "n": 3},
    {**DRAWN, "n": 2, "presence_penalty": 1.0, "logprobs": True, "top_logprobs": 1},
    {"stop_token_ids": (9,), "ignore_eos": False},
    {**DRAWN, "repetition_penalty": 1.5, "banned_token_ids": (4,), "min_tokens": 2, "top_p": 0.5},
    {
        **DRAWN,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "logit_bias": ((17, -1.0), (18, 1.0)),
        "allowed_token_ids": tuple(range(200)),
        "banned_token_ids": (3,),
        "min_tokens": 4,
        "top_k": 100,
        "top_p": 0.95,
        "min_p": 0.01,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    },
]


# Few pages, so that some are preempted, and their histories entered again. Small chunks: there are
# few executables, and compiling them is most of what these tests take.
CONFIG = EngineConfig(
    dtype="float32",
    max_num_seqs=32,
    prefill_chunk_tokens=8,
    page_size=4,
    num_pages=90,
    max_model_len=330,
)
# Reading an id and saying it are two matrices: one row of the first can be broken alone.
MODEL = tiny_config(max_position=1024, tie_word_embeddings=False)
NAN_ID = 200


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, compilation_cache: None) -> Engine:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_huggingface(folder, MODEL, random_tensors(MODEL), dtype=np.float32)
    return Model(open_checkpoint(folder)).build(CONFIG)


@pytest.fixture
def broken_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The embedding of one id is NaN: whoever reads it has no logits that mean anything."""
    executor: Any = engine._executor
    embedding = random_tensors(MODEL)["model.embed_tokens.weight"]
    parameters = list(executor._parameters)
    (at,) = (at for at, each in enumerate(parameters) if np.array_equal(each, embedding))
    embedding[NAN_ID] = np.nan
    parameters[at] = jax.device_put(embedding, parameters[at].sharding)
    monkeypatch.setattr(executor, "_parameters", parameters)
    return engine


def requests() -> list[Request]:
    rng = random.Random(3)
    return [
        request(
            f"r{number}",
            rng.choices(range(320), k=rng.randint(1, 60)),
            max_tokens=24,
            **options,
        )
        for number, options in enumerate(OPTION_SETS)
    ]


def test_a_batch_of_32_option_sets_is_each_alone(engine: Engine):
    """float32 and no close calls at this seed: ids are equal, log-probabilities nearly so."""
    assert len(OPTION_SETS) == 32
    assert len({repr(options) for options in OPTION_SETS}) == 32
    num_compiled = compile_events()
    before = engine.load()
    for one in requests():
        add_request(engine, one)
    together = finish(engine)
    assert engine.load().preemptions_total > before.preemptions_total, "nobody was preempted"
    alone: dict[str, Answer] = {}
    for one in requests():
        add_request(engine, one)
        alone |= finish(engine)
    assert compile_events() == num_compiled
    assert together.keys() == alone.keys()
    assert len(together) == 32 + 2 + 1 + 1
    for name, answer in together.items():
        assert answer.token_ids == alone[name].token_ids, name
        assert answer.finish_reason == alone[name].finish_reason, name
        for part in ("logprobs", "prompt_logprobs", "top", "prompt_top"):
            found, expected = getattr(answer, part), getattr(alone[name], part)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4, err_msg=f"{name} {part}")


def test_every_option_does_what_it_says(engine: Engine):
    """So that the equality above is none of options that are ignored."""
    for one in requests():
        add_request(engine, one)
    answers = finish(engine)
    for one in requests():
        sampling = one.sampling
        for choice in range(sampling.n):
            answer = answers[choice_id(one.request_id, choice)]
            said = set(answer.token_ids)
            assert not said & set(sampling.banned_token_ids)
            if sampling.allowed_token_ids is not None:
                assert said <= set(sampling.allowed_token_ids)
            stops = said & set(sampling.stop_token_ids)
            assert not stops or len(answer.token_ids) > sampling.min_tokens
            assert len(answer.top) == sampling.top_logprobs * len(answer.token_ids)
            num_scored = len(one.prompt_token_ids) - 1 if choice == 0 else 0
            assert len(answer.prompt_top) == sampling.prompt_top_logprobs * num_scored
            assert all(math.isfinite(logprob) for _, logprob in answer.top + answer.prompt_top)
    assert answers["r13"].token_ids == [5] * 24  # a bias of 100
    assert min(answers["r14"].token_ids) >= 300  # a bias of -100 on the others
    assert answers["r20"].token_ids[5:] == [1]  # a stop id, as soon as it may come
    assert answers["r20"].finish_reason is FinishReason.STOP
    top = answers["r23"].top
    assert [token_id for token_id, _ in top[::20]] == answers["r23"].token_ids  # it is greedy
    logprobs = [logprob for _, logprob in top[:20]]
    assert logprobs == sorted(logprobs, reverse=True)


def test_a_history_that_takes_steps_to_enter(engine: Engine):
    """300 biases and a prompt of nearly all ids, cold and with nearly all of the prompt cached.

    Fails if a first token is sampled before the history is complete, or if it is entered before
    the slot forgets the one before it.
    """
    prompt = [*range(310), 5, 6, 7, 8, 9]
    penalised = request("a", prompt, max_tokens=3, repetition_penalty=50.0, logprobs=True)
    biased = replace(
        penalised,
        sampling=replace(
            penalised.sampling,
            logit_bias=tuple((token_id, -90.0) for token_id in range(20, 320)),
        ),
    )
    plain = request("b", prompt, max_tokens=3)
    answers: list[tuple[int, ...]] = []
    num_cached: list[int] = []
    for one in (penalised, penalised, biased, biased, plain, penalised, biased):
        add_request(engine, one)
        (answer,) = finish(engine).values()
        answers.append(tuple(answer.token_ids))
        num_cached.append(answer.num_cached_tokens)
    assert num_cached[0] == 0
    assert min(num_cached[1:]) >= len(prompt) - 2 * CONFIG.page_size
    assert answers[0] == answers[1] == answers[5]
    assert answers[2] == answers[3] == answers[6]
    assert len(set(answers)) == 3
    assert min(answers[0]) >= 310, "an id of the prompt is as likely as before"
    assert max(answers[2]) < 20


def test_nan_ends_the_request_and_touches_nobody(broken_engine: Engine):
    """Nor whoever uses its pages next, nor what the cache keeps. Kinds 12.1 and 12.2."""
    engine = broken_engine
    never = {"banned_token_ids": (NAN_ID,)}
    prompt = [*range(40)]
    healthy = [
        request("greedy", prompt, max_tokens=12, logprobs=True, **never),
        request("drawn", prompt[:7], max_tokens=12, logprobs=True, **DRAWN, **never),
        request(
            "narrow", prompt[:9], max_tokens=12, **DRAWN, top_k=5, logit_bias=((NAN_ID, -99.0),)
        ),
    ]
    alone: dict[str, Answer] = {}
    for one in healthy:
        add_request(engine, one)
        alone |= finish(engine)
    sick = [
        request("sick", [100, NAN_ID, *range(100, 150)], max_tokens=12),  # more than one chunk
        request("sickly", [*prompt[:20], NAN_ID, *prompt[20:]], max_tokens=12),
        request("sicker", [NAN_ID], max_tokens=12, n=2, **DRAWN),
        request("sickest", [*prompt, NAN_ID], max_tokens=12, repetition_penalty=2.0, logprobs=True),
    ]
    for one in (*sick, *healthy):
        add_request(engine, one)
    together = finish(engine)
    for one in sick:
        answer = together[one.request_id]
        assert answer.finish_reason is FinishReason.ERROR
        assert answer.error is not None
        assert "the model's logits are not finite" in answer.error
        assert not answer.token_ids
    assert together[choice_id("sicker", 1)].finish_reason is FinishReason.ERROR
    for one in healthy:
        assert together[one.request_id].token_ids == alone[one.request_id].token_ids
        assert together[one.request_id].logprobs == alone[one.request_id].logprobs
    evicted = engine.load().evicted_pages_total
    assert evicted["broken"] > 0, "pages of a broken request stay in the cache"

"""Same request, same tokens: among 64 with preemptions, alone, and in a naive loop without engine.

What would break this: anything that lets a request's tokens depend on its chunks, its slot, its
pages, its batch-mates or its preemptions.
"""

import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.request import Request

from .conftest import Model
from .fakes import Answer, add_request, finish, request
from .naive import NaiveRun, assert_agrees, generate

NUM_REQUESTS = 64
# Of 90 seeds tried with the fake executor, the one whose requests preempt most: 13 times and more
# at every chunk size, if none of them stops early.
SEED = 31


def random_requests(vocab_size: int, seed: int) -> list[Request]:
    """Prompts of 1 to 600 tokens, outputs of 8 to 64, every option, half of them greedy.

    Short prompts are as common as long ones on a logarithmic scale: many requests run at once then,
    and grow out of the pages.
    """
    # Sizes from a generator of their own: the same for every vocabulary.
    sizes, rng = random.Random(seed), random.Random(seed)
    requests: list[Request] = []
    for number in range(NUM_REQUESTS):
        drawn = {
            "temperature": rng.choice([0.3, 0.7, 1.0, 1.5]),
            "top_k": rng.choice([0, 0, 1, 10, 100]),
            "top_p": rng.choice([1.0, 0.5, 0.95]),
            "min_p": rng.choice([0.0, 0.0, 0.05]),
            "seed": rng.randrange(2**64),
        }
        requests.append(
            request(
                f"r{number}",
                rng.choices(range(vocab_size), k=round(600 ** sizes.random())),
                max_tokens=sizes.randint(8, 64),
                ignore_eos=rng.random() < 0.7,
                stop_token_ids=tuple(rng.sample(range(vocab_size), k=rng.choice([0, 0, 3]))),
                logprobs=rng.random() < 0.3,
                prompt_logprobs=rng.random() < 0.2,
                **(drawn if rng.random() < 0.5 else {}),
            )
        )
    return requests


def naive_runs(model: Model, requests: Sequence[Request]) -> dict[str, NaiveRun]:
    eos = model.checkpoint.eos_token_ids
    return {
        one.request_id: generate(
            model.decoder, one.prompt_token_ids, one.sampling, eos_token_ids=eos
        )
        for one in requests
    }


def config(chunk: int) -> EngineConfig:
    """Hardly more pages than the longest request needs."""
    return EngineConfig(
        dtype="float32", max_num_seqs=8, prefill_chunk_tokens=chunk, page_size=2, num_pages=341
    )


def _pages(engine: Engine) -> list[int]:
    """Which arrays of the device state are pages."""
    state = engine._executor._state
    return [at for at, array in enumerate(state) if array.shape[0] == engine.limits.num_pages]


def poison(engine: Engine) -> None:
    """Fills every page but page 0 with NaN: whoever reads what nobody wrote gets nothing else."""
    state = engine._executor._state
    assert len(_pages(engine)) >= 2
    for at in _pages(engine):
        state[at] = jax.device_put(state[at].at[1:].set(jnp.nan), state[at].sharding)


def assert_page_zero_is_zero(engine: Engine) -> None:
    for at in _pages(engine):
        assert not np.asarray(engine._executor._state[at][0]).any()


def assert_equal_however_it_runs(
    engine: Engine, requests: Sequence[Request], naive: dict[str, NaiveRun]
) -> None:
    poison(engine)
    for one in requests:
        add_request(engine, one)
    together = finish(engine)
    assert_page_zero_is_zero(engine)
    assert engine.load().preemptions_total >= 8
    alone: dict[str, Answer] = {}
    for one in requests:
        add_request(engine, one)
        alone |= finish(engine)
    num_close_calls = 0
    for one in requests:
        name, run = one.request_id, naive[one.request_id]
        # Where no call was close, each of the two equals the naive run, and so the other.
        were_close = [
            assert_agrees(answer, run, one.sampling) for answer in (together[name], alone[name])
        ]
        num_close_calls += any(were_close)
    assert num_close_calls <= len(requests) // 10, "too many close calls to be rounding"


@pytest.fixture(scope="module")
def tiny_requests(tiny_model: Model) -> list[Request]:
    return random_requests(tiny_model.checkpoint.config.vocab_size, SEED)


@pytest.fixture(scope="module")
def tiny_naive(tiny_model: Model, tiny_requests: list[Request]) -> dict[str, NaiveRun]:
    return naive_runs(tiny_model, tiny_requests)


# Annotations are checked by every other test; here they would be half of the time.
@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    "chunk", [*(pytest.param(size, marks=pytest.mark.full) for size in (16, 64)), 256]
)
def test_tokens_are_those_of_the_naive_loop(
    tiny_model: Model, tiny_requests: list[Request], tiny_naive: dict[str, NaiveRun], chunk: int
):
    assert_equal_however_it_runs(tiny_model.build(config(chunk)), tiny_requests, tiny_naive)


@pytest.fixture(scope="module")
def default_requests(default_model: Model) -> list[Request]:
    return random_requests(default_model.checkpoint.config.vocab_size, SEED)


@pytest.fixture(scope="module")
def default_naive(default_model: Model, default_requests: list[Request]) -> dict[str, NaiveRun]:
    return naive_runs(default_model, default_requests)


@pytest.mark.full
@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_tokens_of_the_default_model_are_those_of_the_naive_loop(
    default_model: Model,
    default_requests: list[Request],
    default_naive: dict[str, NaiveRun],
    chunk: int,
):
    assert_equal_however_it_runs(
        default_model.build(config(chunk)), default_requests, default_naive
    )

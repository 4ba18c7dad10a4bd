"""The same request, the same tokens, wherever its KV comes from: computed, cached, brought back.

A real model (tiny, random, float32). Every page that is free is filled with NaN before each step,
and so is, by that, the rest of each page that is not full: fails if anything reads a page that
nobody wrote, or writes one that others read.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.request import Request

from .conftest import Model
from .fakes import Answer, add_request, collect, request

OUTPUT_TOKENS = 12
LENGTHS = {16: (15, 16, 17, 31, 32, 33, 48, 49), 128: (127, 128, 129, 255, 256, 257)}


class Rig:
    """An engine of one page size, run step by step on poisoned pages."""

    def __init__(self, model: Model, page_size: int) -> None:
        self.page_size = page_size
        pages = 60 if page_size == 16 else 7
        config = EngineConfig(
            dtype="float32",
            max_num_seqs=2,
            prefill_chunk_tokens=64,
            page_size=page_size,
            num_pages=pages + 1,
            host_kv_bytes=1 << 22,
        )
        self.engine = model.build(config)
        self.num_pages = pages
        # Page borders are what this is about, not whether copying pays on this machine.
        predictions = self.engine._scheduler._predictions
        costs = dataclasses.replace(predictions._costs, import_page_s=0.0, import_s=0.0)
        predictions._costs = costs
        self.ids = itertools.count()

    def run(self, *requests: Request) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        for one in requests:
            add_request(self.engine, one)
        while self.engine.has_work:
            poison_free_pages(self.engine)
            collect(self.engine.step(), answers)
            self.engine.check()
            assert self.engine.failure is None
        return answers

    def answer(self, prompt: tuple[int, ...], salt: str, **changes: Any) -> Answer:
        one = self.request(prompt, salt, **changes)
        return self.run(one)[one.request_id]

    def request(self, prompt: tuple[int, ...], salt: str, **changes: Any) -> Request:
        values: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "cache_salt": salt} | changes
        return request(f"r{next(self.ids)}", prompt, **values)

    def push_everything_out(self) -> None:
        """Until nothing is cached on the device but what was computed here."""
        length = (self.num_pages // 2) * self.page_size - OUTPUT_TOKENS
        for number in range(3):
            self.answer(tuple((number + at * 3) % 300 for at in range(length)), f"filler{number}")


def poison_free_pages(engine: Engine) -> None:
    """NaN in each page that nobody holds and the cache does not know; page 0 stays zero."""
    pool = engine._scheduler.memory.pool
    # Of one size, so that it compiles once; what is past the pool is dropped.
    free = np.full(pool.num_pages, pool.num_pages, np.int32)
    free[: pool.num_free] = pool._free
    executor = engine._executor
    for index in range(executor._num_kv_leaves):  # the first of the state
        executor._state[index] = _poison(executor._state[index], free)


@jax.jit
def _poison(pages: jax.Array, free: jax.Array) -> jax.Array:
    return pages.at[free].set(jnp.nan, mode="drop")


@pytest.fixture(scope="module", params=[16, pytest.param(128, marks=pytest.mark.full)])
def rig(request: pytest.FixtureRequest, tiny_model: Model) -> Rig:
    return Rig(tiny_model, request.param)


def _prompt(length: int, first: int = 3) -> tuple[int, ...]:
    return tuple((first + at * at * 7) % 300 for at in range(length))


def _lengths(rig: Rig) -> tuple[int, ...]:
    return LENGTHS[rig.page_size]


def test_cached(rig: Rig) -> None:
    """Kind 4.2: the last token is computed again, and never in a page that others read."""
    for length in _lengths(rig):
        prompt, salt = _prompt(length), f"cached{length}"
        cold = rig.answer(prompt, salt)
        assert cold.num_cached_tokens == 0
        warm = rig.answer(prompt, salt)
        assert warm == cold
        assert warm.num_cached_tokens == (length - 1) // rig.page_size * rig.page_size
        extended = (*prompt, *cold.token_ids[:1], 5, 6)
        assert rig.answer(extended, salt) == rig.answer(extended, f"fresh{length}")


def test_partially_cached(rig: Rig) -> None:
    """Every prompt shares all pages but its last with another, and then differs."""
    for length in _lengths(rig):
        whole = _prompt(length + rig.page_size)
        other = (*whole[:length], *(299 - token for token in whole[length:]))
        rig.answer(whole, f"partial{length}")
        warm = rig.answer(other, f"partial{length}")
        assert warm.num_cached_tokens == length // rig.page_size * rig.page_size
        assert warm == rig.answer(other, f"alone{length}")


def test_moved_to_host_memory_and_back(rig: Rig) -> None:
    """Fails if a page comes back other than it went, or is used before it is there."""
    for length in _lengths(rig):
        prompt, salt = _prompt(length), f"moved{length}"
        cold = rig.answer(prompt, salt)
        rig.push_everything_out()
        before = rig.engine.load()
        back = rig.answer(prompt, salt)
        after = rig.engine.load()
        assert back == cold
        cached = (length - 1) // rig.page_size
        assert back.num_cached_tokens == cached * rig.page_size
        assert after.imported_pages_total - before.imported_pages_total == cached
        assert before.exported_pages_total > 0


def test_preempted(rig: Rig) -> None:
    """It loses its pages to an earlier request, and comes back to what is left of them."""
    size = rig.page_size
    for length in _lengths(rig):
        # Together they outgrow the pool by a page or two before either ends.
        room = rig.num_pages * size
        wanted = rig.request(_prompt(length), f"late{length}", max_tokens=2 * size)
        filler = room - length - 2 * size
        early = rig.request(_prompt(filler, 11), f"early{length}", max_tokens=3 * size)
        before = rig.engine.load().preemptions_total
        answers = rig.run(early, wanted)
        assert rig.engine.load().preemptions_total > before
        alone = rig.answer(wanted.prompt_token_ids, f"solo{length}", max_tokens=2 * size)
        assert answers[wanted.request_id] == alone


def test_another_tenant_sees_nothing_of_it(rig: Rig) -> None:
    prompt = _prompt(_lengths(rig)[-1])
    first = rig.answer(prompt, "shared", tenant="a")
    steps_before = rig.engine.load().steps_total
    other = rig.answer(prompt, "shared", tenant="b")
    assert other.num_cached_tokens == 0
    num_steps = rig.engine.load().steps_total - steps_before
    assert other == first
    steps_before = rig.engine.load().steps_total
    assert rig.answer(prompt, "shared", tenant="c").num_cached_tokens == 0
    assert rig.engine.load().steps_total - steps_before == num_steps

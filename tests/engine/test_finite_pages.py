"""Kinds 12.1 and 12.3: no step leaves a number that is none in any page, nor anything in page 0.

Rows and chunks are mostly padding here, with what the slots' last owners left in them; a row that
attends to nothing and is not guarded divides 0 by 0, writes that into the cache, and it spreads.
"""

import jax
import numpy as np
import pytest

from octavo.engine.engine import Engine

from .conftest import TINY_ENGINE, Model
from .fakes import Answer, add_request, finish, request, step
from .test_option_mix import requests


@pytest.fixture(scope="module")
def engine(tiny_model: Model) -> Engine:
    return tiny_model.build(TINY_ENGINE)


def assert_pages_are_sound(engine: Engine) -> None:
    executor = engine._executor
    for leaf in executor._state[: executor._num_kv_leaves]:
        pages = np.asarray(leaf)
        assert len(pages) == engine.limits.num_pages
        assert np.isfinite(pages).all()
        assert not pages[0].any()


@pytest.mark.usefixtures("types_unchecked")
def test_every_number_in_every_page_is_finite_after_every_step(engine: Engine):
    """From one row to more requests than slots, with preemptions, aborts and every option."""
    wanted = requests()
    answers: dict[str, Answer] = {}
    for number, one in enumerate(wanted):
        add_request(engine, one)
        for _ in range(3 if number < 6 else 1):
            step(engine, answers)
            assert_pages_are_sound(engine)
        if number % 5 == 4:
            engine.abort(one.request_id)
    while engine.has_work:
        step(engine, answers)
        assert_pages_are_sound(engine)
    assert engine.load().preemptions_total > 0


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF], ids=["zero", "huge", "NaN"])
def test_what_idle_slots_hold_changes_no_bit_of_a_live_one(engine: Engine, byte: int):
    """Kind 12.1: everything of every slot but the one that runs, rule tables included.

    A float of four bytes 0x7F is 3e38, one of four bytes 0xFF is NaN, and such integers are -1.
    """
    one = request("a", (1, 2, 3, 4, 5), max_tokens=12, logprobs=True, temperature=1.0, seed=1)
    add_request(engine, one)
    expected = finish(engine)["a"]
    executor, answers = engine._executor, dict[str, Answer]()
    add_request(engine, one)
    while engine.has_work:
        step(engine, answers)
        is_live = np.zeros(TINY_ENGINE.max_num_seqs, bool)
        is_live[[state.slot for state in engine._scheduler.running]] = True
        for at in range(executor._num_kv_leaves, len(executor._state)):
            leaf = executor._state[at]
            rows = np.array(leaf)
            rows.view(np.uint8)[~is_live] = byte
            executor._state[at] = jax.device_put(rows, leaf.sharding)
    assert answers["a"] == expected

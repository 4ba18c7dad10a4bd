"""A model with several end-of-sequence ids: which of them end an output, and from where on.

On the device, which rules ids out and sees the stop; each is all but certain by a bias.
"""

import time
from typing import Any

import pytest

from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.engine.request import FinishReason

from .conftest import TINY_ENGINE, Model, ignore_progress
from .fakes import Answer, add_request, finish, request

END_IDS = (2, 9, 300)
OWN_ID = 17
PROMPT = (5, 6, 7, 8)
NEARLY_CERTAIN = 100.0


@pytest.fixture(scope="module")
def engine(tiny_model: Model) -> Engine:
    return build_engine(
        tiny_model.checkpoint,
        TINY_ENGINE,
        eos_token_ids=frozenset(END_IDS),
        clock=time.monotonic,
        on_progress=ignore_progress,
    ).engine


def answer(engine: Engine, likely: int, **options: Any) -> Answer:
    """What a request says whose model all but always says one id."""
    values: dict[str, Any] = {"max_tokens": 8, "ignore_eos": False} | options
    one = request("a", PROMPT, logit_bias=((likely, NEARLY_CERTAIN),), **values)
    add_request(engine, one)
    return finish(engine)["a"]


@pytest.mark.parametrize("end_id", END_IDS)
@pytest.mark.parametrize("own", [(), (OWN_ID,), (OWN_ID, 300)])
def test_any_of_them_ends_an_output(engine: Engine, end_id: int, own: tuple[int, ...]):
    """Kind 2.4 a: fails if only the first one counts, or the request's own replace them."""
    found = answer(engine, end_id, stop_token_ids=own)
    assert found == Answer([end_id], finish_reason=FinishReason.STOP, stop_token_id=end_id)


@pytest.mark.parametrize("end_id", END_IDS)
def test_ignored_none_of_them_does(engine: Engine, end_id: int):
    """Kind 2.4 b."""
    found = answer(engine, end_id, ignore_eos=True)
    assert found == Answer([end_id] * 8, finish_reason=FinishReason.LENGTH)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("own_id", [OWN_ID, 300])
def test_a_requests_own_id_ends_it_all_the_same(engine: Engine, own_id: int, ignore_eos: bool):
    """Kind 2.4 b and d: also an id that is the model's as well, and ignored as such."""
    found = answer(engine, own_id, ignore_eos=ignore_eos, stop_token_ids=(own_id,))
    assert found == Answer([own_id], finish_reason=FinishReason.STOP, stop_token_id=own_id)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.1, "n": 2}], ids=str
)
@pytest.mark.parametrize("end_id", [*END_IDS, OWN_ID])
def test_exactly_min_tokens_come_before_the_end(
    engine: Engine, end_id: int, options: dict[str, Any], num_tokens: int
):
    """Kinds 2.4 c and 2.5: none of the ids comes earlier, and the likely one at once after."""
    found = answer(engine, end_id, min_tokens=num_tokens, stop_token_ids=(OWN_ID,), **options)
    assert (found.finish_reason, found.stop_token_id) == (FinishReason.STOP, end_id)
    *before, last = found.token_ids
    assert (len(before), last) == (num_tokens, end_id)
    assert not {*END_IDS, OWN_ID} & set(before)


def test_who_is_preempted_counts_on(engine: Engine):
    """Kind 2.5: fails if an output that was computed again begins to count anew."""
    num_preempted = engine.load().preemptions_total
    for number in range(7):
        one = request(
            f"r{number}",
            (number, *PROMPT),
            max_tokens=60,
            min_tokens=55,
            ignore_eos=False,
            logit_bias=((9, NEARLY_CERTAIN),),
        )
        add_request(engine, one)
    answers = finish(engine)
    assert engine.load().preemptions_total > num_preempted
    for found in answers.values():
        assert found.finish_reason is FinishReason.STOP
        assert (len(found.token_ids), found.token_ids[-1]) == (56, 9)
        assert not set(END_IDS) & set(found.token_ids[:-1])


def test_the_limit_counts_where_the_end_may_not_come(engine: Engine):
    """min_tokens as large as max_tokens: the ids stay ruled out to the last."""
    found = answer(engine, 9, max_tokens=4, min_tokens=4)
    assert found.finish_reason is FinishReason.LENGTH
    assert len(found.token_ids) == 4
    assert not set(END_IDS) & set(found.token_ids)

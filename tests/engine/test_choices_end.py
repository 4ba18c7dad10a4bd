"""Several choices and their ends at every step. Kinds 4.2, 5.1 and 6.5, for n > 1."""

from collections import Counter

import pytest

from octavo.engine.admission import choice_id
from octavo.engine.refusals import InvalidRequest
from octavo.engine.request import FinishReason, RequestOutput

from .fakes import Answer, add_request, fake_engine, finish, request, run_alone, small_config

PROMPT = tuple(range(1, 22))
NAMES = [choice_id("a", choice) for choice in range(4)]


def test_an_abort_at_every_step_ends_each_choice_once():
    """Kind 6.5: while the first has its prompt computed, while others queue, after some ended, and
    at the very step in which the last one ends. Two slots, so that some always wait.
    """
    one = request("a", PROMPT, n=4, max_tokens=9, temperature=1.0, seed=5, ignore_eos=False)
    num_steps, seen = 0, Counter[str]()
    engine, _ = fake_engine(small_config(max_num_seqs=2), num_pages=40)
    expected = {
        name: run_alone(one, engine.config, engine.limits, choice)
        for choice, name in enumerate(NAMES)
    }
    while True:
        engine, _ = fake_engine(small_config(max_num_seqs=2), num_pages=40)
        add_request(engine, one)
        outputs: list[RequestOutput] = []
        for _ in range(num_steps):
            outputs += engine.step()
        was_live = engine.abort("a")
        assert not engine.abort("a"), "an abort must be idempotent"
        while engine.has_work:
            outputs += engine.step()
            engine.check()
        ends = [output for output in outputs if output.finish_reason is not None]
        assert sorted(output.choice for output in ends) == [0, 1, 2, 3]
        num_cancelled = sum(output.finish_reason is FinishReason.CANCELLED for output in ends)
        seen["all" if num_cancelled == 4 else "some" if num_cancelled else "none"] += 1
        assert was_live is (num_cancelled > 0)
        load = engine.load()
        assert load.num_free_pages == load.num_usable_pages
        assert load.num_running == load.num_queued == 0
        assert sum(load.finished_total.values()) == 4
        if not num_steps % 7:  # its id is free, and nothing of it is left that another could meet
            add_request(engine, one)
            assert finish(engine) == expected
        if not was_live:
            break
        num_steps += 1
    assert min(seen["all"], seen["some"], seen["none"]) > 0


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_prompts_around_page_borders(length: int):
    """Kind 4.2: forks of a prompt that is all in the cache, and of one that is not; one token."""
    engine, _ = fake_engine(small_config(page_size=16, prefill_chunk_tokens=64))
    prompt = tuple(at % 30 for at in range(length))
    one = request("a", prompt, n=2, max_tokens=1, temperature=1.0, seed=2)
    for is_cached in (False, True):
        add_request(engine, one)
        answers = finish(engine)
        for choice in range(2):
            expected = run_alone(one, engine.config, engine.limits, choice)
            assert answers[choice_id("a", choice)] == expected
        most = (length - 1) // 16 * 16
        assert answers[choice_id("a", 1)].num_cached_tokens == most
        assert answers["a"].num_cached_tokens == (most if is_cached else 0)


def test_choices_that_can_never_fit_are_refused_and_those_that_wait_get_their_turn():
    """Kind 5.1: four outputs of which each fills the pool run one after the other, and end."""
    engine, _ = fake_engine(num_pages=9)
    with pytest.raises(InvalidRequest, match="max_tokens is 31"):
        add_request(engine, request("a", (1, 2, 3), n=4, max_tokens=31))
    one = request("a", (1, 2, 3), n=4, max_tokens=30, temperature=1.0, seed=9)
    small = request("small", (4, 5), max_tokens=4)
    add_request(engine, one)
    add_request(engine, small)
    answers: dict[str, Answer] = finish(engine)
    assert answers.keys() == {*NAMES, "small"}
    for choice, name in enumerate(NAMES):
        assert answers[name] == run_alone(one, engine.config, engine.limits, choice)
    assert answers["small"] == run_alone(small, engine.config, engine.limits)

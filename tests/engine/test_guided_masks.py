"""Guided outputs in the loop: who waits for a mask, who does not, and how a guide fails."""

import threading
import time
from typing import override

import numpy as np
import pytest

from octavo.engine import packing
from octavo.engine.engine import Engine
from octavo.engine.guided_masks import GuidedMasks, GuideError
from octavo.engine.request import FinishReason
from octavo.engine.sampling_params import Guide
from octavo.engine.step_shapes import StepKey

from .fake_guides import FakeGuides, FakeGuideState, HeldGuides, guide, mask_of
from .fake_model import EOS
from .fakes import (
    Answer,
    Clock,
    FakeExecutor,
    add_request,
    collect,
    fake_engine,
    finish,
    limits_for,
    planned_costs,
    request,
    run_alone,
    small_config,
)


def engine_with(guides: FakeGuides | None) -> tuple[Engine, FakeExecutor]:
    config = small_config()
    limits = limits_for(config, 65)
    executor = FakeExecutor(config, limits)
    engine = Engine(config, limits, executor, Clock(), planned_costs(config), guides=guides)
    return engine, executor


def test_an_engine_without_guides_fails_those_that_ask_for_one_and_nobody_else():
    """Breaks if it ends the engine's thread, and all requests with it."""
    engine, _ = engine_with(None)
    add_request(engine, request("guided", max_tokens=5, guide=guide(1), ignore_eos=False))
    add_request(engine, request("plain", max_tokens=5))
    answers = finish(engine)
    assert answers["guided"].finish_reason is FinishReason.GUIDE
    assert answers["guided"].error == "this engine makes no guides"
    assert len(answers["plain"].token_ids) == 5


def test_others_do_not_wait_for_a_mask():
    """A slow guide keeps nobody but its own request: fails if the loop waits for it."""
    guides = HeldGuides()
    engine, executor = engine_with(guides)
    guided = request("guided", max_tokens=5, guide=guide(1), ignore_eos=False)
    plain = request("plain", max_tokens=20)
    add_request(engine, guided)
    add_request(engine, plain)
    answers: dict[str, Answer] = {}
    started_s = time.monotonic()
    while "plain" not in answers or answers["plain"].finish_reason is None:
        collect(engine.step(), answers)
    assert time.monotonic() - started_s < 5
    assert answers.keys() == {"plain"}
    assert answers["plain"] == run_alone(plain, engine.config, engine.limits)
    assert len(executor.keys) == 20, "a step went by without the request that could go on"
    guides.may_go_on.set()
    finish(engine, answers)
    assert answers["guided"] == run_alone(guided, engine.config, engine.limits)


def test_a_guided_row_runs_every_second_step_beside_others():
    engine, executor = fake_engine()
    guided = request("guided", max_tokens=6, min_tokens=6, guide=guide(4), ignore_eos=False)
    plain = request("plain", max_tokens=30)
    add_request(engine, guided)
    add_request(engine, plain)
    answers = finish(engine)
    num_tokens = len(answers["guided"].token_ids)
    assert num_tokens == 6
    rows = [key.rows for key in executor.keys[1 : 2 * num_tokens - 1]]
    assert len(executor.keys) == 30
    assert len(rows) == 2 * (num_tokens - 1)


def test_alone_it_is_one_step_after_the_other():
    """Dispatched, read, dispatched: there is nothing to run ahead with."""
    engine, executor = fake_engine()
    add_request(engine, request("a", max_tokens=6, min_tokens=6, guide=guide(4), ignore_eos=False))
    answer = finish(engine)["a"]
    assert len(answer.token_ids) == 6
    assert executor.log == [(what, step) for step in range(6) for what in ("dispatch", "fetch")]


class FailingGuides(FakeGuides):
    """Follows two ids and no more."""

    @override
    def start(self, guide: Guide) -> FakeGuideState:
        if guide.text == "0":
            raise ValueError("no guide has number 0")
        if guide.text == "9":
            raise RecursionError("secret details")

        class Failing(FakeGuideState):
            @override
            def take(self, token_id: int) -> None:
                super().take(token_id)
                if len(self.taken) == 2:
                    raise GuideError("the guide is lost")

        return Failing(int(guide.text))


@pytest.mark.parametrize(
    ("number", "reason", "error", "length"),
    [
        (4, FinishReason.GUIDE, "the guide is lost", 2),
        (0, FinishReason.GUIDE, "no guide has number 0", 0),
        (9, FinishReason.ERROR, "the guide failed", 0),  # a bug is nothing that the request did
    ],
)
def test_a_guide_that_fails_ends_its_request_alone(
    number: int, reason: FinishReason, error: str, length: int
):
    engine, _ = engine_with(FailingGuides())
    plain = request("plain", max_tokens=20)
    add_request(
        engine, request("a", max_tokens=9, min_tokens=9, guide=guide(number), ignore_eos=False)
    )
    add_request(engine, plain)
    answers = finish(engine)
    assert answers["a"].finish_reason is reason
    assert answers["a"].error == error
    assert len(answers["a"].token_ids) == length
    assert answers["plain"] == run_alone(plain, engine.config, engine.limits)


def test_ids_that_no_guide_lets_come_end_the_request():
    engine, _ = fake_engine()
    one, other = (
        request(
            str(token_id),
            max_tokens=9,
            min_tokens=9,
            guide=guide(1),
            ignore_eos=False,
            allowed_token_ids=(token_id, EOS),
        )
        for token_id in (0, 1)
    )
    add_request(engine, one)
    add_request(engine, other)
    answers = finish(engine)
    errors = [answer.error for answer in answers.values() if answer.error]
    assert errors == ["the guide and the ids that may come have none in common"] * len(errors)
    assert errors


def test_a_guide_that_begins_slowly_holds_up_none_that_runs():
    """Fails if all guides share one thread."""
    may_begin = threading.Event()

    class SlowToBegin(FakeGuides):
        @override
        def start(self, guide: Guide) -> FakeGuideState:
            assert guide.text != "5" or may_begin.wait(10)
            return super().start(guide)

    engine, _ = engine_with(SlowToBegin())
    running = request("running", max_tokens=9, min_tokens=9, guide=guide(4), ignore_eos=False)
    add_request(engine, running)
    answers: dict[str, Answer] = {}
    while not answers:
        collect(engine.step(), answers)
    add_request(engine, request("late", max_tokens=2, guide=guide(5), ignore_eos=False))
    while answers["running"].finish_reason is None:
        collect(engine.step(), answers)
    assert answers.keys() == {"running"}
    may_begin.set()
    finish(engine, answers)
    assert answers["late"].token_ids


@pytest.mark.parametrize("has_slot", [False, True])
def test_a_step_waits_for_the_masks_of_those_that_have_a_slot(
    has_slot: bool, monkeypatch: pytest.MonkeyPatch
):
    """A queued one cannot run next: fails if each step waits as long as it may for its mask."""
    wait_s = 0.1 if has_slot else 3.0
    config, clock, guides = small_config(max_num_seqs=1 + has_slot), Clock(), HeldGuides()
    engine, _ = fake_engine(config, clock=clock, guides=guides)
    least_s = min(planned_costs(config).base_s.values())
    monkeypatch.setattr("octavo.engine.engine.MASK_WAIT", wait_s / least_s)
    add_request(engine, request("plain", max_tokens=30))
    answers: dict[str, Answer] = {}
    while not answers:
        collect(engine.step(), answers)
    add_request(engine, request("guided", max_tokens=2, guide=guide(4), ignore_eos=False))
    engine.step()
    (state,) = engine._guides._pending
    assert (state.slot is not None) == has_slot
    clock.now_s += 1.0  # the step in flight takes so long
    engine.step()
    started_s = time.monotonic()
    for _ in range(3):
        clock.now_s += 1.0
        engine.step()
    assert (time.monotonic() - started_s >= 3 * wait_s) == has_slot
    guides.may_go_on.set()
    finish(engine)


def test_a_request_that_is_gone_leaves_no_guide_behind():
    guides = HeldGuides()
    engine, _ = engine_with(guides)
    add_request(engine, request("a", max_tokens=5, guide=guide(1), ignore_eos=False, n=2))
    engine.step()
    engine.abort("a")
    guides.may_go_on.set()
    finish(engine)
    assert not engine._guides._guides
    assert not engine._guides._pending


def test_masks_go_up_only_where_one_changes(monkeypatch: pytest.MonkeyPatch):
    """A static one once per insertion, a guide's with each token, for nobody else."""
    engine, executor = fake_engine()
    changed: list[int] = []
    dispatch = executor.dispatch

    def watch(
        key: StepKey, packed: np.ndarray, mask_rows: np.ndarray | None = None
    ) -> tuple[int, np.ndarray]:
        slots = np.array([]) if mask_rows is None else mask_rows[:, packing.MASK_SLOT]
        changed.append(int((slots < engine.config.max_num_seqs).sum()))
        return dispatch(key, packed, mask_rows)

    monkeypatch.setattr(executor, "dispatch", watch)
    add_request(engine, request("plain", max_tokens=8))
    add_request(engine, request("banned", max_tokens=8, banned_token_ids=(3,)))
    finish(engine)
    assert changed == [1, *[0] * 7]
    changed.clear()
    add_request(
        engine, request("guided", max_tokens=6, min_tokens=6, guide=guide(4), ignore_eos=False)
    )
    finish(engine)
    assert changed == [1] * 6


def test_waiting_for_masks_has_an_end():
    masks = GuidedMasks(HeldGuides())
    engine, _ = fake_engine()
    add_request(engine, request("a", guide=guide(1), ignore_eos=False))
    (state,) = engine._scheduler.live.values()
    masks.begin(state)
    started_s = time.monotonic()
    masks.wait(0.05)
    assert 0.04 < time.monotonic() - started_s < 5
    assert not list(masks.done())
    masks.close()


def test_a_mask_keeps_no_bit_beyond_what_it_was_given():
    mask = mask_of([0, 31, 32, 39])
    assert mask.dtype == np.int32
    assert mask.tolist() == [-(2**31) + 1, 1 + (1 << 7)]

"""How guided outputs end while they wait: a deadline, a cancel, one choice of several, the limit.

A guided request sits out steps until its mask is there, and then nothing of it is in any step: what
ends it must not need one. Kinds 6.1, 6.5 and 10.7.
"""

import pytest

from octavo.engine.admission import choice_id
from octavo.engine.engine import Engine
from octavo.engine.request import FinishReason

from .fake_guides import HeldGuides, guide
from .fakes import (
    Answer,
    Clock,
    FakeExecutor,
    add_request,
    collect,
    finish,
    limits_for,
    planned_costs,
    request,
    run_alone,
    small_config,
)

GUIDE = guide(4)


class Rig:
    """An engine whose guided outputs get stuck after some tokens; one that is plain runs beside."""

    def __init__(self, num_free: int, n: int = 1) -> None:
        config = small_config()
        limits = limits_for(config, 65)
        self.guides, self.clock = HeldGuides(num_free), Clock()
        self.engine = Engine(
            config,
            limits,
            FakeExecutor(config, limits),
            self.clock,
            planned_costs(config),
            guides=self.guides,
        )
        self.plain = request("plain", max_tokens=60)
        self.guided = request(
            "guided",
            max_tokens=40,
            min_tokens=40,
            guide=GUIDE,
            ignore_eos=False,
            n=n,
            temperature=1.0,
            seed=3,
            deadline_s=100.0,
        )
        self.answers: dict[str, Answer] = {}
        add_request(self.engine, self.guided)
        add_request(self.engine, self.plain)
        self.wanted = [choice_id("guided", choice) for choice in range(n)]
        while num_free and not any(self.num_said(name) == num_free for name in self.wanted):
            self.step()
        for _ in range(3):  # what is in flight arrives
            self.step()
        self.said = [self.num_said(name) for name in self.wanted]

    def num_said(self, name: str) -> int:
        return len(self.answers[name].token_ids) if name in self.answers else 0

    def assert_ended(self, reason: FinishReason) -> None:
        """Every output, and with what it had said before."""
        for name, number in zip(self.wanted, self.said, strict=True):
            assert self.answers[name].finish_reason is reason
            assert self.num_said(name) == number

    def step(self) -> None:
        collect(self.engine.step(), self.answers)
        self.engine.check()

    def end(self) -> None:
        """Lets masks come and runs to the end; nothing may be left, and nobody was disturbed."""
        self.guides.may_go_on.set()
        finish(self.engine, self.answers)
        load = self.engine.load()
        assert load.num_running == load.num_queued == 0
        assert load.num_free_pages == load.num_usable_pages
        expected = run_alone(self.plain, self.engine.config, self.engine.limits)
        assert self.answers["plain"] == expected


@pytest.mark.parametrize("num_free", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_a_deadline_passes_while_masks_are_awaited(num_free: int, n: int):
    """Fails if a deadline is looked at only where a step brings something; it is no `length`."""
    rig = Rig(num_free, n)
    rig.clock.now_s = 101.0
    rig.step()
    rig.assert_ended(FinishReason.DEADLINE)
    rig.end()


@pytest.mark.parametrize("num_free", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_a_cancel_while_masks_are_awaited(num_free: int, n: int):
    rig = Rig(num_free, n)
    assert rig.engine.abort("guided")
    assert not rig.engine.abort("guided"), "an abort must be idempotent"
    rig.step()
    rig.assert_ended(FinishReason.CANCELLED)
    rig.end()


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_one_choice_is_ended_while_all_wait_and_the_others_go_on(choice: int):
    """As by a stop string. The others go on as if they were alone when their masks come."""
    rig = Rig(2, n=3)
    assert rig.engine.abort("guided", FinishReason.STOP, choice=choice)
    rig.step()
    assert rig.answers[rig.wanted[choice]].finish_reason is FinishReason.STOP
    assert rig.num_said(rig.wanted[choice]) == rig.said[choice]
    rig.end()
    for other in {0, 1, 2} - {choice}:
        expected = run_alone(rig.guided, rig.engine.config, rig.engine.limits, other)
        assert rig.answers[rig.wanted[other]] == expected


def test_alone_a_deadline_passes_too():
    """With nothing else to run no step comes at all."""
    rig = Rig(1)
    rig.engine.abort("plain")
    rig.step()
    rig.clock.now_s = 101.0
    rig.step()
    assert rig.answers["guided"].finish_reason is FinishReason.DEADLINE
    rig.guides.may_go_on.set()
    assert not rig.engine.has_work

"""What goes up for penalties and biases: the right counts, and no more work than a step takes."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, override

import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine import packing
from octavo.engine.rule_entries import rule_entries
from octavo.engine.schedule import RequestState
from octavo.engine.scheduler import Scheduler

from .fakes import planned_costs, request, small_config
from .state_machine import few_entries


class Watched(tuple[int, ...]):
    """A prompt that knows how many of its ids were looked at."""

    num_seen = 0

    @override
    def __iter__(self) -> Iterator[int]:
        for token_id in super().__iter__():
            self.num_seen += 1
            yield token_id


def state_of(prompt: tuple[int, ...], outputs: list[int], **sampling: Any) -> RequestState:
    state = RequestState(request=request("a", prompt, **sampling), max_tokens=9, stop_ids=())
    state.slot, state.output_token_ids = 3, outputs
    return state


def test_each_id_goes_up_once_with_what_was_read_and_said():
    state = state_of((5, 6, 5), [6, 7, 7], presence_penalty=1.0, logit_bias=((9, 2.0),))
    entries = rule_entries(state)
    assert entries is not None
    assert sorted(entries) == [
        (3, packing.COUNTED, 5, 1),
        (3, packing.COUNTED, 6, 1 << packing.COUNT_SHIFT | 1),
        (3, packing.COUNTED, 7, 2 << packing.COUNT_SHIFT),
        (3, 0, 9, packing.float_bits(2.0)),
    ]


def test_who_has_no_rules_waits_for_no_room():
    """Room is short where others have a long history; it is not for those who need none."""
    assert rule_entries(state_of((5, 6), [6])) is None


def test_a_long_prompt_is_looked_at_as_far_as_a_step_takes_it_up():
    """Fails if a slot costs the engine's thread its whole prompt, and again once preempted."""
    prompt = Watched(range(1000))
    state = state_of((1,), [], repetition_penalty=2.0)
    object.__setattr__(state.request, "prompt_token_ids", prompt)
    for _ in range(2):
        entries = rule_entries(state)
        assert entries is not None
        assert len(list(islice(entries, 10))) == 10
    assert prompt.num_seen == 22, "one more each time, to know that there are more"


@pytest.mark.parametrize("num_ids", range(1, 10))
def test_the_last_token_waits_for_the_history_and_no_longer(num_ids: int):
    """Three ids a step: it samples in the step that takes the last, also where that is full.

    One step later is too late for a prompt of one id: its slot row would come after its counts, and
    make the device forget them.
    """
    config: EngineConfig = small_config(max_num_seqs=1)
    scheduler = Scheduler(config, 20, planned_costs(config))
    state = RequestState(
        request=request("a", range(num_ids), presence_penalty=1.0), max_tokens=1, stop_ids=()
    )
    with few_entries(hits=8, rules=3):
        scheduler.add(state)
        num_entered, num_steps = 0, 0
        while not state.num_sampled:
            step = scheduler.schedule(0.0)
            assert step is not None
            num_entered += len(step.rule_entries)
            num_steps += 1
        assert num_entered == num_ids
        assert num_steps == -(-num_ids // 3)

"""The host loop beside a null device: a real engine, steady steps, work that no context adds to."""

import itertools
import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, get_args

import pytest

from octavo.bench import host_loop
from octavo.configs.scheduling_config import PolicyName
from octavo.engine.engine import Engine
from octavo.server.command_line import run_command


def test_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows=8", "--rows=3", "--context_tokens=20", "--steps=100", "--json"]
    assert run_command(host_loop.COMMAND, arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == 8
    assert [each["rows"] for each in printed["all"]] == [8, 3]
    assert 0 < printed["host_ms_per_step"] < printed["host_p99_ms"] * 1.01
    assert printed["front_end_us_per_token"] > 0


def test_a_queue_waits_under_the_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Breaks if a flag does not reach the engine."""
    engines: list[Engine] = []

    def engine(*arguments: Any) -> Engine:
        engines.append(Engine(*arguments))
        return engines[-1]

    async def front_end(num_tokens: int, clock: Callable[[], float]) -> float:
        return 1.0  # it is not about that, which takes seconds

    monkeypatch.setattr(host_loop, "Engine", engine)
    monkeypatch.setattr(host_loop, "front_end_us_per_token", front_end)
    queue = ["--policy=fair", "--num_waiting=6", "--num_tenants=5"]
    assert run_command(host_loop.COMMAND, ["--rows=4", "--steps=100", "--json", *queue]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 4
    (only,) = engines
    assert only.config.scheduling.policy == "fair"
    scheduler = only._scheduler
    assert (len(scheduler.running), len(scheduler.waiting)) == (4, 6)
    assert len({state.request.tenant for state in scheduler.live.values()}) == 5


@pytest.mark.parametrize("flag", ["--rows=0", "--rows=5000", "--context_tokens=0"])
def test_refuses_sizes_out_of_bounds(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(host_loop.COMMAND, [flag]) == 2
    assert "it must be in [1, " in capsys.readouterr().err


def _calls_per_step(rows: int, context_tokens: int, queue: host_loop.Queue | None = None) -> float:
    """Calls of Python functions in a steady step, which no other process disturbs."""
    num_calls = 0
    steps: list[int] = []

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    def clock() -> float:
        # Called at the begin and at the end of every timed step, among others.
        steps.append(num_calls)
        return float(len(steps))

    previous: Callable[..., Any] | None = sys.getprofile()
    sys.setprofile(count)
    try:
        host_loop.measure(rows, context_tokens, 160, clock, queue or host_loop.Queue())
    finally:
        sys.setprofile(previous)
    timed = [after - before for before, after in itertools.pairwise(steps)]
    return sum(timed[-600:]) / len(timed[-600:])


@pytest.mark.usefixtures("types_unchecked")
def test_work_per_step_does_not_grow_with_the_context() -> None:
    """Fails if a step looks at all pages or tokens of a request."""
    short, long = _calls_per_step(8, 40), _calls_per_step(8, 1600)
    assert long < short * 1.1


@pytest.mark.usefixtures("types_unchecked")
def test_work_per_row_is_a_few_calls() -> None:
    """Fails if the read path makes objects or calls per row beyond what it needs."""
    few, many = _calls_per_step(8, 40), _calls_per_step(72, 40)
    # Per clock reading; a step reads the clock four times.
    assert (many - few) / 64 * 4 < 6


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_work_per_step_does_not_grow_with_the_queue(policy: PolicyName) -> None:
    """Fails if a policy goes through all that wait, or through all their tenants, in each step."""
    few, many = (
        _calls_per_step(8, 40, host_loop.Queue(policy=policy, num_waiting=n, num_tenants=n))
        for n in (10, 300)
    )
    assert many < few * 1.1

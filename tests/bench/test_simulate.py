"""The tables of `octavo.bench.simulate`: small ones here, the whole ones under `full`."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from octavo.bench.simulate import COMMAND
from octavo.bench.simulate_fairness import fairness
from octavo.bench.simulation_report import Check, Report
from octavo.bench.simulation_setup import COSTS, Engine, capacity_per_s
from octavo.configs.scheduling_config import SchedulingConfig
from octavo.engine.simulated_traffic import Stream
from octavo.engine.step_shapes import StepKey
from octavo.server.command_line import run_command


def _table(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Runs a table in this process; all that it is to show holds."""
    assert run_command(COMMAND, [*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_thousandth_of_a_million(capsys: pytest.CaptureFixture[str]):
    """Breaks if a request is lost, if a replica is overlooked, or if a class is missing."""
    table = _table(["million", "--requests=300", "--replicas=2"], capsys)
    assert all(check["holds"] for check in table["checks"])
    rows = table["rows"]
    assert [row["requests"] for row in rows if row["tenant"] == "all"] == ["300"]
    assert len(rows) == 1 + 3 + 9
    assert sum(int(row["requests"]) for row in rows[1:4]) == 300
    assert sum(int(row["requests"]) for row in rows[4:]) == 300
    assert any("a step takes 8 ms" in line for line in table["about"]), "costs are hidden"


def test_the_same_seed_gives_the_same_table(capsys: pytest.CaptureFixture[str]):
    arguments = ["million", "--requests=60", "--replicas=2", "--seeds=5"]
    first, second = (_table(arguments, capsys)["rows"] for _ in range(2))
    assert first == second
    assert _table([*arguments[:3], "--seeds=6"], capsys)["rows"] != first


def test_capacity_is_what_an_engine_that_is_never_idle_serves():
    """Two slots, outputs of 10 on the mean, steps of 8 ms and a little: not quite 25 a second.

    Breaks if the engine idles while it is measured, or if its warm-up counts.
    """
    engine = Engine(costs=COSTS["accelerator"], max_num_seqs=2, prefill_chunk_tokens=64)
    stream = Stream(prompt_tokens=8, output_tokens=10, has_tail=False)
    assert 20 <= capacity_per_s(engine, [stream], 1, 5.0) <= 2 / (8e-3 * 10)


def test_costs_add_up():
    costs = COSTS["accelerator"]
    config = Engine(costs=costs, max_num_seqs=2, prefill_chunk_tokens=64).deployment(
        SchedulingConfig()
    )
    step_s = config.costs.step_s(StepKey(2, 64), decode_kv_tokens=1000, chunk_kv_tokens=500)
    assert step_s == pytest.approx(8e-3 + 2 * 4e-6 + 64 * 3e-5 + 1000 * 44e-9 + 500 * 1e-9)


def test_fairness_is_checked_at_each_size():
    """Breaks if a size is left out. What it shows in a few seconds need not hold."""
    report = fairness(COSTS["cpu"], [1], 4.0)
    slots = report.header.index("slots")
    assert [row[slots] for row in report.rows] == ["32"] * 6 + ["8"] * 3
    at_8_slots = ["at 8 slots" in check.name for check in report.checks]
    assert at_8_slots == [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    ("value", "low", "high", "holds"),
    [
        (1.0, 1.0, 1.0, True),
        (0.9, 1.0, None, False),
        (1.1, None, 1.0, False),
        (float("nan"), 0.0, None, False),
        (float("nan"), None, 1.0, False),
    ],
)
def test_a_check_holds_only_for_numbers_within_bounds(
    value: float, low: float | None, high: float | None, holds: bool
):
    """Breaks if a table of no requests, whose percentiles are NaN, counts as good."""
    check = Check(name="x", value=value, low=low, high=high)
    assert check.holds == holds
    report = Report(about=["about"], header=["a"], rows=[["1"]], checks=[check])
    assert ("FAILS" in report.as_text()) == (not holds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "TABLE is 'nothing'"),
        ([], "TABLE"),
        (["million", "--seeds=x"], "--seeds is x"),
        (["million", "--costs=free"], "costs"),
    ],
)
def test_says_what_is_wrong_with_the_command_line(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command(COMMAND, arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("table", ["fairness", "goodput", "retries"])
def test_the_table_shows_what_it_promises(table: str):
    """Three seeds, in a process of its own so that types are not checked at run time.

    fairness breaks if nobody who floods gives way to whoever was served less; goodput if hopeless
    requests keep their turn; retries if promised places are given to newcomers.
    """
    done = _process([table])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_twenty_thousand_requests_over_64_replicas():
    """A fiftieth of `make simulate TABLE=million`. Breaks if the cost per request grows.

    The bound is five times what it takes: the machine may be busy.
    """
    done = _process(["million", "--requests=20000", "--json"], timeout_s=90)
    assert done.returncode == 0, done.stdout + done.stderr


def _process(
    arguments: Sequence[str], timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.bench.simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)

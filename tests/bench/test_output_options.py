"""What options cost: batches that run in turn on a fake device, and the numbers they come to."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import output_options
from octavo.bench.output_options import Kind, measure, run_batch
from octavo.configs.engine_config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.request import RequestOutput
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.server.command_line import run_command
from tests.engine.fakes import fake_engine, small_config

KINDS = [
    Kind(name="greedy", options={"temperature": 0.0}),
    Kind(name="drawn", options={"temperature": 1.0}),
    Kind(
        name="mixed",
        options={"temperature": 1.0},
        others={"guide": Guide(kind=GuideKind.REGEX, text="4")},
        num_others=1,
    ),
]


def engine() -> Engine:
    """Its device takes no time, so masks are waited for, as they are while a real step runs."""
    made = fake_engine(small_config(prefill_chunk_tokens=128), num_pages=200)[0]
    step = made.step

    def patient_step() -> list[RequestOutput]:
        made._guides.wait(10.0)
        return step()

    object.__setattr__(made, "step", patient_step)
    return made


def ticks() -> Any:
    """A clock on which every reading is a second after the one before."""
    return itertools.count(0.0, 1.0).__next__


def test_a_guided_row_takes_two_steps_a_token_and_others_one():
    timing = run_batch(engine(), KINDS[2], 4, 20, ticks())
    assert set(timing.gaps_s) == {1.0}
    assert max(timing.other_gaps_s) == 2.0
    assert timing.tokens_per_s == pytest.approx(3.5, abs=0.2)


def test_a_batch_that_fails_is_no_measurement():
    bad = Kind(name="bad", options={"guide": Guide(kind=GuideKind.REGEX, text="no number")})
    with pytest.raises(RuntimeError, match="bad: row-0: invalid literal"):
        run_batch(engine(), bad, 1, 4, ticks())


def test_every_batch_is_compared_with_the_drawn_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def kinds(rows: int) -> list[Kind]:
        return KINDS

    def build(config: EngineConfig) -> Engine:
        return engine()

    monkeypatch.setattr(output_options, "kinds", kinds)
    lines = measure([("plain", engine()), ("second", engine())], 4, 10, 2, ticks())
    assert [line.name for line in lines] == ["greedy", "drawn", "mixed", "second"]
    assert lines[1].of_drawn == 1.0
    assert lines[2].of_drawn < 1.0
    assert lines[2].other_gap_ms == 2000.0
    assert lines[0].other_gap_ms is None

    monkeypatch.setattr(output_options, "build", build)
    monkeypatch.setattr(output_options, "use_persistent_cache", Path)
    arguments = ["--rows=3", "--output_tokens=8", "--rounds=1", "--deterministic", "--json"]
    assert run_command(output_options.COMMAND, arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["lines"]) == 4
    assert printed["compile_events"] == 0
    assert run_command(output_options.COMMAND, ["--rows=33"]) == 2
    assert "--rows is 33; it must be in [1, 32]" in capsys.readouterr().err

"""The command from its flags to its output; tests/server/test_retries.py has the measurement.

Breaks when a flag is ignored or does not reach the server, or a failure still prints numbers.
"""

import json
from typing import Any

import pytest

from octavo.bench import retries
from octavo.bench.retries import COMMAND
from octavo.server.command_line import run_command

from ..server import processes

SMALL = ["--requests=8", "--overload=0.2", "--output_tokens=4", "--prompt_tokens=5"]


@pytest.fixture
def fake_server(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Starts a server with the fake engine instead; what was asked for."""
    asked: list[Any] = []

    def start(command: Any, timeout_s: float) -> Any:
        asked.append(command)
        return real_process(processes.fake_server_command(), timeout_s)

    real_process = retries.server_process
    monkeypatch.setattr(retries, "server_process", start)
    return asked


def test_json_has_everything(fake_server: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The fake engine has eight slots, and brings a token each 20 ms."""
    line = [*SMALL, "--json", "--dtype=float32", "--serve_flags=--page_size=8"]
    assert run_command(COMMAND, line) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] == {"name": "fake", "dtype": "float32", "device": "cpu"}
    assert (shown["options"]["overload"], shown["options"]["requests"]) == (0.2, 8)
    assert 0 < shown["capacity_per_s"] < 8 / 0.04
    assert shown["offered_per_s"] == pytest.approx(0.2 * shown["capacity_per_s"])
    for run in ("obeying", "at_once"):
        assert (shown[run]["sent"], shown[run]["refused"], shown[run]["share"]) == (8, 0, None)
    (command,) = fake_server
    assert command[-3:] == ["--page_size=8", "--max_num_seqs=8", "--max_num_queued=8"]
    assert "--dtype=float32" in command


def test_the_table(fake_server: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, [*SMALL, "--max_num_seqs=4", "--max_num_queued=2"]) == 0
    headline, header, *rows = capsys.readouterr().out.splitlines()
    assert "4 slots and 2 places in the queue, 5 prompt and about 4 output tokens" in headline
    assert header.split()[:3] == ["retry", "sent", "refused"]
    assert [row.split()[:4] for row in rows] == [["as", "told", "8", "0"], ["at", "once", "8", "0"]]
    assert fake_server[0][-2:] == ["--max_num_seqs=4", "--max_num_queued=2"]


BAD_COMMAND_LINES = {
    "--overload=0": "--overload is 0.0; it must be in [0.1, 100]",
    "--overload=nan": "--overload is nan",
    "--requests=1": "--requests is 1; it must be in [2, 100000]",
    "--max_num_seqs=0": "--max_num_seqs is 0",
    "--max_num_queued=-1": "--max_num_queued is -1",
    "--output_tokens=1": "--output_tokens is 1; it must be at least 2",
    "--serve_flags='": '--serve_flags is "\'"',
    "--server=a:1": "Unknown command line flag 'server'",
    "quickly": "'quickly' is too much",
}


@pytest.mark.parametrize("line", BAD_COMMAND_LINES)
def test_bad_command_lines_end_in_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, line.split()) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    (said,) = errors.splitlines()
    assert said.startswith("python -m octavo.bench.retries: error: ")
    assert BAD_COMMAND_LINES[line] in said


@pytest.mark.usefixtures("fake_server")
def test_a_refused_request_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, ["--requests=2", "--prompt_tokens=5000"]) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert "error: request 0 failed: INVALID_ARGUMENT: " in errors


@pytest.mark.full
def test_a_real_server(capsys: pytest.CaptureFixture[str]) -> None:
    """The default model at one and a half times its capacity."""
    line = [
        "--requests=80",
        "--max_num_seqs=4",
        "--max_num_queued=4",
        "--output_tokens=16",
        "--json",
    ]
    line += ["--serve_flags=--prefill_chunk_tokens=32 --max_model_len=128 --num_pages=128"]
    assert run_command(COMMAND, line) == 0
    out = capsys.readouterr().out
    print(out)
    shown = json.loads(out)
    obeying, at_once = shown["obeying"], shown["at_once"]
    assert obeying["refused"] >= 20
    assert obeying["share"] >= 0.8
    assert at_once["refused"] >= 20
    assert at_once["share"] <= 0.2

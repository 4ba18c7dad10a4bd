"""The command from its flags to its output, against a server process with the fake engine.

Breaks when a flag is ignored, a mode or a round is missing, or a failure still prints numbers.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import throughput
from octavo.bench.load_flags import server_command
from octavo.bench.server_process import server_process
from octavo.bench.throughput import COMMAND
from octavo.server.command_line import CommandError, run_command

from ..server import processes


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with processes.server_process(processes.fake_server_command()) as server:
        yield server.address


def test_json_has_everything(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = [f"--server={address}", "--json", "--concurrency=3,1", "--rounds=2"]
    line += ["--output_tokens=4", "--prompt_tokens=5", "--requests_per_client=1"]
    assert run_command(COMMAND, line) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] == {
        "name": "fake",
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 8,
    }
    assert shown["workload"]["prompts"] == "random ids"
    assert (shown["workload"]["prompt_tokens"], shown["workload"]["output_tokens"]) == (5, 4)
    assert [level["concurrency"] for level in shown["levels"]] == [3, 1]
    for level in shown["levels"]:
        for mode in ("greedy", "sampled"):
            measured = level[mode]
            assert len(measured["rounds_tokens_per_s"]) == 2
            # The fake engine brings one token each 20 ms, and cannot be faster than that.
            assert 0 < measured["tokens_per_s"] <= 50 * level["concurrency"] * 4 / 3
            assert measured["itl_ms"] > 10
            assert measured["ttft_ms"] > 0
        ratio = level["sampled"]["tokens_per_s"] / level["greedy"]["tokens_per_s"]
        assert level["sampled_over_greedy"] == pytest.approx(ratio)


def test_table_and_prompts_from_a_text(
    address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("To be, or not to be")
    line = [f"--server={address}", "--concurrency=2", "--rounds=1", "--output_tokens=2"]
    line += ["--prompt_tokens=8", f"--prompt_text={tmp_path / 'text'}"]
    assert run_command(COMMAND, line) == 0
    headline, header, *rows = capsys.readouterr().out.splitlines()
    assert "8 prompt and 2 output tokens" in headline
    assert header.split()[:3] == ["clients", "mode", "tokens/s"]
    assert [row.split()[:2] for row in rows] == [["2", "greedy"], ["2", "sampled"]]


BAD_COMMAND_LINES = {
    "--concurrency=": "--concurrency is empty",
    "--concurrency=1,x": "--concurrency is 1,x; it must be whole numbers",
    "--concurrency=1,0": "--concurrency has 0; each level must be in [1, 4096]",
    "--concurrency=8,8": "--concurrency is (8, 8); no level may come twice",
    "--rounds=0": "--rounds is 0; it must be in [1, 1000]",
    "--rounds=x": "--rounds is 'x'; it must be an integer",
    "--requests_per_client=0": "--requests_per_client is 0",
    "--prompt_tokens=0": "--prompt_tokens is 0; it must be at least 1",
    "--output_tokens=1": "--output_tokens is 1; it must be at least 2",
    "--temperature=0": "--temperature is 0.0; it must be above 0",
    "--top_p=2": "--top_p is 2.0; it must be in (0, 1]",
    "--prompt_text=/no/such/file": "--prompt_text is '/no/such/file'",
    "--dtype=float16": "--dtype is 'float16'; it must be one of bfloat16, float32",
    "--serve_flags='": '--serve_flags is "\'"',
    "--start_timeout_s=-1": "--start_timeout_s",
    "--server=a:1 --dtype=float32": "--dtype is for a server that is started",
    "--server=a:1 --serve_flags=--page_size=8": "--serve_flags is for a server that is started",
    "--speed=9": "Unknown command line flag 'speed'",
    "quickly": "'quickly' is too much",
}


@pytest.mark.parametrize("line", BAD_COMMAND_LINES)
def test_bad_command_lines_end_in_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, line.split()) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    (said,) = errors.splitlines()
    assert said.startswith("python -m octavo.bench.throughput: error: ")
    assert BAD_COMMAND_LINES[line] in said


def test_a_refused_request_fails_the_command(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [f"--server={address}", "--concurrency=1", "--prompt_tokens=5000"]
    assert run_command(COMMAND, line) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert "error: concurrency 1: request 0 failed: INVALID_ARGUMENT: " in errors


def test_no_server_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, ["--server=127.0.0.1:1"]) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert "error: 127.0.0.1:1: UNAVAILABLE: " in errors


def test_a_text_that_is_too_short_fails_by_name(
    address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("To be")
    line = [f"--server={address}", f"--prompt_text={tmp_path / 'text'}"]
    assert run_command(COMMAND, line) == 2
    assert "--prompt_text has 5 tokens; it must have at least" in capsys.readouterr().err


def test_without_a_server_it_starts_one_and_stops_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def fake_command(values: Any) -> list[str]:
        asked.append(server_command(values))
        return processes.fake_server_command()

    monkeypatch.setattr(throughput, "server_command", fake_command)
    line = ["--concurrency=1", "--rounds=1", "--output_tokens=2", "--dtype=float32"]
    line += ["--serve_flags=--page_size=8 --model='a b'"]
    assert run_command(COMMAND, line) == 0
    assert "octavo, fake, float32 on cpu" in capsys.readouterr().out
    (words,) = asked
    assert words[0] == sys.executable
    assert words[-7:] == [
        *("serve", "--port=0", "--withdrawal_grace_s=0"),
        *("--model=smollm2-135m-instruct", "--dtype=float32"),
        *("--page_size=8", "--model=a b"),
    ]


def start(command: list[str], timeout_s: float = 30) -> None:
    async def scenario() -> None:
        async with server_process(command, timeout_s):
            pass

    asyncio.run(scenario())


def test_a_server_that_ends_before_it_is_ready_fails() -> None:
    with pytest.raises(CommandError, match="ended with 3 before it was ready"):
        start([sys.executable, "-c", "print('almost', flush=True); raise SystemExit(3)"])


def test_a_server_that_is_not_ready_in_time_fails() -> None:
    with pytest.raises(CommandError, match=r"not ready after 0\.2 s"):
        start([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)


@pytest.mark.full
def test_a_real_server(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--concurrency=2", "--rounds=1", "--output_tokens=4", "--json"]
    line += ["--serve_flags=--max_num_seqs=2 --prefill_chunk_tokens=32 --max_model_len=64"]
    assert run_command(COMMAND, line) == 0
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    assert level["greedy"]["tokens_per_s"] > 0

"""The comparison from its flags to its output: fake engine on one side, fake peer on the other.

Both repeat the prompt, so they agree; the peer's times are chosen, so its speeds are known. Breaks
when the sides run different prompts, a batch is left out, or a warm-up is counted.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import compare_transformers
from octavo.bench.compare_transformers import COMMAND, model_path
from octavo.server.command_line import UsageError, run_command

from ..server import processes
from .fakes import fake_python

# The first question is the warm-up.
SLOW_FIRST = """first_s = globals().setdefault("first_s", iter([100]))
    print(json.dumps({"token_ids": [(prompt * n)[:n] for prompt in prompts],
                      "prefill_s": 0.5, "decode_s": next(first_s, 1.5)}), flush=True)"""


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A short run, whose server is the fake one."""

    def fake_server(values: Any) -> list[str]:
        return processes.fake_server_command()

    monkeypatch.setattr(compare_transformers, "server_command", fake_server)
    monkeypatch.setattr(compare_transformers, "SETTLE_S", 0.0)
    model = tmp_path / "model.gguf"
    model.touch()
    return [f"--model={model}", "--concurrency=3", "--rounds=2", "--output_tokens=4"]


def test_json_has_everything(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*line, f"--peer_python={fake_python(tmp_path, SLOW_FIRST)}", "--json"]
    assert run_command(COMMAND, line) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["peer"]["transformers"] == "5"
    assert shown["peer"]["dtype"] == "bfloat16"
    (level,) = shown["levels"]
    # Batches of 3: three decoded tokens each in 1.5 s, four in all in 2 s.
    assert level["peer_decode_tokens_per_s"] == [6, 6]
    assert level["peer_tokens_per_s"] == [6, 6]
    assert level["same_first_token"] == 1
    assert len(level["greedy"]["rounds_tokens_per_s"]) == 2
    assert len(level["sampled"]["rounds_tokens_per_s"]) == 2
    assert level["greedy_over_peer"] == pytest.approx(level["greedy"]["tokens_per_s"] / 6)


def test_table(line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, [*line, f"--peer_python={fake_python(tmp_path)}"]) == 0
    octavo, peer, header, *rows = capsys.readouterr().out.splitlines()
    assert octavo.startswith("octavo, fake, ")
    assert peer.startswith("transformers 5, torch 2, bfloat16, ")
    assert header.split()[:4] == ["clients", "who", "timed", "tokens/s"]
    assert [row.split()[:3] for row in rows[:4]] == [
        ["3", "transformers", "decode"],
        ["3", "transformers", "prefill"],
        ["3", "octavo", "greedy"],
        ["3", "octavo", "sampled"],
    ]
    assert rows[4].startswith("same first token on both sides: 100%")
    # Octavo's own rounds may differ on a busy machine.
    assert not any("rounds of transformers" in row for row in rows)


def test_other_tokens_show(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer with other weights, or that got other prompts."""
    answer = """print(json.dumps({"token_ids": [[999] * n for _ in prompts],
                      "prefill_s": 0.5, "decode_s": 1.5}), flush=True)"""
    line = [*line, f"--peer_python={fake_python(tmp_path, answer)}"]
    assert run_command(COMMAND, line) == 0
    assert "same first token on both sides: 0%" in capsys.readouterr().out


def test_a_busy_machine_shows(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the second timed round on the peer takes twice as long."""
    answer = """count = globals().get("count", 0) + 1
    print(json.dumps({"token_ids": [(prompt * n)[:n] for prompt in prompts],
                      "prefill_s": 0.5, "decode_s": 3 if count > 3 else 1.5}), flush=True)"""
    line = [*line, f"--peer_python={fake_python(tmp_path, answer)}"]
    assert run_command(COMMAND, line) == 0
    assert (
        "WARNING: at 3 clients the rounds of transformers differ by a factor of 2.0"
        in capsys.readouterr().out
    )


def test_a_peer_that_ends_fails_the_command(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*line, f"--peer_python={fake_python(tmp_path, 'sys.exit(3)')}"]
    assert run_command(COMMAND, line) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert "error: the peer ended with 3" in errors


def test_no_peer_says_how_to_make_one(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, [*line, "--peer_python=/no/such/python"]) == 1
    assert "make one with `make peer-env`" in capsys.readouterr().err


def test_models_that_transformers_cannot_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "converted").mkdir()
    with pytest.raises(UsageError, match=r"--model is '.*converted'; transformers reads"):
        model_path(str(tmp_path / "converted"))
    (tmp_path / "converted" / "config.json").touch()
    assert model_path(str(tmp_path / "converted")) == tmp_path / "converted"

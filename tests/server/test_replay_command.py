"""`octavo replay`: what it says of whole logs, of logs without an end, and of one request."""

import json
from pathlib import Path

import pytest

from octavo.engine.event_log import EventLog
from octavo.server.main import main
from tests.engine.fakes import add_request, fake_engine, finish, request


def write_log(path: Path, max_bytes: int = 1 << 20) -> Path:
    log = EventLog(path, max_bytes)
    engine, _ = fake_engine(recorder=log)
    for name in ("a", "b"):
        add_request(engine, request(name, range(10), max_tokens=3))
        finish(engine)
    log.close()
    return path


def without(path: Path, num_characters: int) -> str:
    return path.read_text()[:-num_characters]


def test_a_whole_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log(tmp_path / "log")
    assert main(["replay", str(path)]) == 0
    out, errors = capsys.readouterr()
    assert out.startswith("2 requests, ")
    assert out.endswith("the same schedule, and all invariants hold\n")
    assert errors == ""


CLOSED = '{"op":"closed"}\n'


@pytest.mark.parametrize(
    ("num_cut", "said"),
    [
        (len(CLOSED), "the log was replayed so far, but it has no end: its server runs"),
        (len(CLOSED) + 9, "the log was replayed up to its last line, which is torn, and it has no"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--request_id=b"]])
def test_a_log_without_an_end_says_so(
    num_cut: int, said: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if what a killed server left is called whole."""
    path = write_log(tmp_path / "log")
    path.write_text(without(path, num_cut))
    assert main(["replay", str(path), *more]) == 0
    out, errors = capsys.readouterr()
    assert out
    assert errors.startswith(f"octavo replay: {path}: {said}")
    assert errors.count("\n") == 1


def test_a_full_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log(tmp_path / "log", max_bytes=3000)
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().err.endswith("the log was cut off at its largest size\n")


def test_the_story_of_one_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log(tmp_path / "log")
    assert main(["replay", str(path), "--request_id=b"]) == 0
    story = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["kind"] for event in story] == ["queued", "admitted", "first_token", "ended"]
    assert (story[-1]["reason"], story[-1]["output_tokens"]) == ("length", 3)


def test_a_request_that_is_not_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_log(tmp_path / "log")
    assert main(["replay", str(path), "--request_id=c"]) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors == f"octavo replay: error: {path}: there is no request 'c' among 2\n"

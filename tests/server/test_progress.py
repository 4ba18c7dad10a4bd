"""What a terminal and a log file see of the same progress."""

import os
from io import RawIOBase
from pathlib import Path
from typing import TextIO

from octavo.server.progress import ProgressDisplay


def show(display: ProgressDisplay) -> None:
    display("loading", 0, 0)
    for done in range(21):
        display("compiling", done, 20)
    display.close()


def everything(stream: TextIO, screen: RawIOBase) -> str:
    """What was written to a terminal so far; one read may return less."""
    end = "end of what was shown"
    stream.write(end)
    stream.flush()
    seen = ""
    while not seen.endswith(end):
        seen += (screen.read(10_000) or b"").decode()
    return seen.removesuffix(end)


def test_a_log_file_gets_a_few_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as stream:
        show(ProgressDisplay(stream))
    assert path.read_text() == "loading\n" + "".join(
        f"compiling {done} of 20\n" for done in (0, 4, 8, 12, 16, 20)
    )


def test_a_line_is_taken_off_once() -> None:
    """What is on the terminal by the second time is somebody else's."""
    reader, writer = os.openpty()
    with open(writer, "w") as stream, open(reader, "rb", buffering=0) as screen:
        display = ProgressDisplay(stream)
        display.close()
        display("loading", 0, 0)
        display.close()
        display.close()
        assert everything(stream, screen) == "\r\x1b[Kloading\r\x1b[K"


def test_a_terminal_gets_one_line_in_place_and_none_at_the_end() -> None:
    states = ["loading", *(f"compiling {done} of 20" for done in range(21)), ""]
    expected = "".join(f"\r\x1b[K{state}" for state in states)
    reader, writer = os.openpty()
    with open(writer, "w") as stream, open(reader, "rb", buffering=0) as screen:
        show(ProgressDisplay(stream))
        assert everything(stream, screen) == expected

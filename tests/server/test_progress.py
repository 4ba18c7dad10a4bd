"""What a terminal and a log file see of the same progress."""

import os
from pathlib import Path

from octavo.server.progress import ProgressDisplay

END = "end of what was shown"


def show(display: ProgressDisplay) -> None:
    display("loading", 0, 0)
    for done in range(21):
        display("compiling", done, 20)
    display.close()


def test_a_log_file_gets_a_few_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as stream:
        show(ProgressDisplay(stream))
    assert path.read_text() == "loading\n" + "".join(
        f"compiling {done} of 20\n" for done in (0, 4, 8, 12, 16, 20)
    )


def test_a_terminal_gets_one_line_in_place_and_none_at_the_end() -> None:
    states = ["loading", *(f"compiling {done} of 20" for done in range(21)), ""]
    expected = "".join(f"\r\x1b[K{state}" for state in states)
    reader, writer = os.openpty()
    with open(writer, "w") as stream, open(reader, "rb", buffering=0) as screen:
        show(ProgressDisplay(stream))
        stream.write(END)
        stream.flush()
        seen = ""
        while END not in seen:  # one read may return less than was written
            seen += screen.read(10_000).decode()
    assert seen == expected + END

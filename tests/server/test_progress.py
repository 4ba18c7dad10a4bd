"""What a terminal and a log file see of the same progress."""

import io

import pytest

from octavo.server.progress import ProgressDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (
            io.StringIO(),
            "loading\ncompiling 0 of 20\ncompiling 4 of 20\ncompiling 8 of 20\n"
            "compiling 12 of 20\ncompiling 16 of 20\ncompiling 20 of 20\n",
        ),
        (
            Terminal(),
            "\r\x1b[Kloading"
            + "".join(f"\r\x1b[Kcompiling {done} of 20" for done in range(21))
            + "\r\x1b[K",
        ),
    ],
    ids=["log file", "terminal"],
)
def test_progress(stream: io.StringIO, expected: str) -> None:
    display = ProgressDisplay(stream)
    display("loading", 0, 0)
    for done in range(21):
        display("compiling", done, 20)
    display.close()
    assert stream.getvalue() == expected

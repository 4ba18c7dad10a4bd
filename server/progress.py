"""Shows how far loading is, on stderr: in place on a terminal, in plain lines elsewhere."""

from collections.abc import Callable
from typing import TextIO

OnProgress = Callable[[str, int, int], None]
"""Told what is being done, how many of its parts are done, and how many there are (0: unknown)."""

_PLAIN_LINES_PER_STAGE = 5


def describe(stage: str, done: int, total: int) -> str:
    """In words, as in "compiling 12 of 20"."""
    return f"{stage} {done} of {total}" if total else stage


class ProgressDisplay:
    """An OnProgress that writes to a stream; any thread may call it."""

    def __init__(self, stream: TextIO) -> None:
        """Writes to `stream`, which says itself whether it is a terminal."""
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._last = ("", -1)
        self._is_shown = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows this state."""
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{describe(stage, done, total)}")
            self._is_shown = True
        else:
            # A log file needs no line for each of many parts.
            part = (stage, done * _PLAIN_LINES_PER_STAGE // total if total else 0)
            if part == self._last:
                return
            self._last = part
            self._stream.write(describe(stage, done, total) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Takes the line off a terminal, if one is on it."""
        if self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_shown = False

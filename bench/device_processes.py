"""Runs a part of the device check in processes of its own, and stops them when time is up. No JAX.

Processes, because what a kernel breaks stays broken in its process, and one that hangs can only be
killed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .device_parts import Part
from .device_records import Section, ShareRecords, read_records, section_of

_POLL_S = 0.2
_PROBE_S = 60.0
_MOST_DRY_PROCESSES = 2
_STDERR_CHARACTERS = 1500
_SCRIPT = Path(__file__).with_name("device_check.py")


def has_accelerator() -> bool:
    """Whether JAX finds one. Where it cannot tell, the parts will."""
    command = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S, check=False
        )
        return done.stdout.split()[-1:] != [b"cpu"]
    return True


class _Share:
    """The tasks of one process, and of those that take over where it fails."""

    def __init__(self, part: Part, index: int, count: int, scratch: Path, is_dry_run: bool) -> None:
        self._records = scratch / f"{part.name}-{index}.jsonl"
        self._stderr = self._records.with_suffix(".stderr")
        self._command = [
            sys.executable,
            str(_SCRIPT),
            f"--part={part.name}",
            f"--share={index}/{count}",
            f"--records={self._records}",
            *(["--dry_run"] if is_dry_run else []),
        ]
        self._environment = dict(os.environ)
        if is_dry_run:
            self._environment["JAX_PLATFORMS"] = "cpu"
        if count > 1:  # or the first one takes most of the device's memory
            self._environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        self._num_begun = 0
        self._deaths: list[str] = []
        self._start()

    def _start(self) -> None:
        with self._stderr.open("w") as stderr:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=self._environment,
            )

    def found(self) -> ShareRecords:
        """What is known by now."""
        return ShareRecords(records=read_records(self._records), deaths=tuple(self._deaths))

    def is_running(self) -> bool:
        """Whether it is not done; a process that failed is followed by another."""
        code = self._process.poll()
        if code is None:
            return True
        if code == 0:
            return False
        found = self.found()
        has_begun_none = len(found.begun) == self._num_begun
        if has_begun_none or found.begun[-1] not in found.found:
            tail = self._stderr.read_text(errors="replace").rstrip()[-_STDERR_CHARACTERS:]
            # The last line mostly says why, and a summary may show no more.
            why = tail.rpartition("\n")[2]
            self._deaths.append(f"its process ended with {code}: {why}\n{tail}")
        # Where it began nothing, the next process would only fail again.
        if has_begun_none or len(found.begun) == len(found.tasks):
            return False
        self._num_begun = len(found.begun)
        self._start()
        return True

    def stop(self) -> None:
        """Kills it, if it still runs."""
        self._process.kill()
        self._process.wait()


def run_part(
    part: Part,
    scratch: Path,
    *,
    limit_s: float,
    is_dry_run: bool,
    on_change: Callable[[Section], None],
) -> None:
    """Runs all tasks of a part, for so many seconds at most.

    Args:
      part: What is run.
      scratch: A folder for what its processes record.
      limit_s: Seconds after which what still runs is killed.
      is_dry_run: Whether on the CPU, with small tasks.
      on_change: Is given the section when a task has ended, and at the end.
    """
    began_s = time.perf_counter()
    most = _MOST_DRY_PROCESSES if is_dry_run else os.cpu_count() or 1
    count = min(part.processes, most)
    shares = [_Share(part, index, count, scratch, is_dry_run) for index in range(count)]
    stopped_after_s: float | None = None

    def section() -> Section:
        seconds = time.perf_counter() - began_s
        found = [share.found() for share in shares]
        return section_of(found, seconds=seconds, stopped_after_s=stopped_after_s)

    try:
        num_known = 0
        # Each of them is asked, so that one that failed is followed by another at once.
        while sum(share.is_running() for share in shares):
            if time.perf_counter() - began_s > limit_s:
                stopped_after_s = limit_s
                break
            num_found = sum(len(share.found().found) for share in shares)
            if num_found > num_known:
                num_known = num_found
                on_change(section() | {"status": "running"})
            time.sleep(_POLL_S)
    finally:
        for share in shares:
            share.stop()
    on_change(section())

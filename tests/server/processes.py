"""Servers in processes of their own."""

import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OCTAVO = [sys.executable, "-m", "octavo.server"]


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    ready_line: str

    @property
    def address(self) -> str:
        found = re.search(r"grpc=(\S+)", self.ready_line)
        assert found is not None, self.ready_line
        return found[1]


@contextmanager
def server_process(command: list[str], *, wait: bool = True) -> Generator[ServerProcess]:
    """Runs one; waits for its READY line unless told not to; kills what is left of it."""
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield ServerProcess(process, process.stdout.readline() if wait else "")
    finally:
        process.kill()
        process.communicate()


def fake_server_command(
    *, load_s: float = 0, drain_timeout_s: float = 30, grace_s: float = 0, hangs: bool = False
) -> list[str]:
    numbers = map(str, (load_s, drain_timeout_s, grace_s))
    command = [sys.executable, "-m", "tests.server.fake_serve", *numbers]
    return [*command, "hangs" if hangs else "ends"]

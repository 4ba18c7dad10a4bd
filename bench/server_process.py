"""`octavo serve` in a process of its own, from its READY line to its end."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from ..server.command_line import CommandError

_STOP_TIMEOUT_S = 30.0


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The words that run `octavo serve` with this interpreter."""
    return [sys.executable, "-m", "octavo.server", "serve", *arguments]


@asynccontextmanager
async def server_process(command: Sequence[str], start_timeout_s: float) -> AsyncGenerator[str]:
    """Runs a server while inside; yields host:port. What it says on stderr shows.

    Args:
      command: Its words; it prints a READY line as `octavo serve` does.
      start_timeout_s: How long loading and compiling may take.

    Raises:
      CommandError: It ended, or the time was over, before it was ready.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    try:
        try:
            async with asyncio.timeout(start_timeout_s):
                address = await _ready_address(process)
        except TimeoutError as error:
            raise CommandError(f"the server was not ready after {start_timeout_s:g} s") from error
        yield address
    finally:
        await stop_process(process)


async def stop_process(process: asyncio.subprocess.Process) -> None:
    """Asks a process to end, and kills it if it does not."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _ready_address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if found := re.match(rb"READY grpc=(\S+)", line):
            return found[1].decode()
    raise CommandError(f"the server ended with {await process.wait()} before it was ready")

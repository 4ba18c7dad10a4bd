"""How `python -m octavo.bench.NAME` runs its command."""

import sys

from ..server.command_line import EXIT_INTERRUPTED, Command, run_command


def main(command: Command) -> int:
    """Runs a command on the arguments of this process; returns the exit code."""
    try:
        return run_command(command, sys.argv[1:])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED

"""The `octavo` console script: finds the command and runs it."""

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from ..configs.chips import GPU_MEMORY_SHARE
from .command_line import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, run_command
from .late_import import late_import

# Commands are imported when they run: some bring JAX, which takes a second to import.
COMMANDS = ("serve", "generate", "chat", "fetch", "convert", "plan", "replay")

_WORDS = (*COMMANDS, "version")

_EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

_USAGE = """\
usage: octavo COMMAND [flags]

commands:
  serve     serve a model over gRPC
  generate  continue one prompt
  chat      talk to a model
  fetch     bring a preset's weights into the cache
  convert   write a checkpoint in the format that loads fastest
  plan      what a model takes on chips that are not there
  replay    run the scheduler again from an event log
  version   print which octavo this is

`octavo COMMAND --help` explains the flags of a command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code.

    Args:
      arguments: Words after `octavo`. None: those of this process.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("", "help", "-h", "--help"):
        print(_USAGE)
        return 0
    if name in ("version", "--version"):
        print(importlib.metadata.version("octavo"))
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, _WORDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it must be one of {', '.join(_WORDS)}"
        print(f"octavo: error: command is {name!r}; {hint}", file=sys.stderr)
        return EXIT_USAGE
    # gRPC's C core logs what its callers report better; read once, when a command imports grpc.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # JAX takes three quarters of a GPU's memory by itself; read once, when a command imports it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))
    _open_closed_streams()
    command = late_import(f"{name}_command").COMMAND
    try:
        return run_command(command, rest)
    except OSError as error:
        # Mostly output that cannot be written: what is left of it must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever read it, `head` perhaps, has had enough
            return _EXIT_BROKEN_PIPE
        print(f"octavo {name}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        # Compilations that are under way cannot be stopped, and a normal exit waits for all that
        # are queued.
        sys.stdout.flush()
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)


def _open_closed_streams() -> None:
    """Stands in for standard streams that the caller closed, which Python leaves as None.

    In order: the next file to be opened gets the lowest free number, so nothing else ends up as
    standard output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))

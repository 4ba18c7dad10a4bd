"""`octavo replay`: runs the scheduler again from an event log, and tells one request's story."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from ..engine.replay import LogEnd, ReplayError, replay
from .command_line import Command, CommandError, UsageError

_NOT_CLOSED = "it has no end: its server runs (and writes late), was killed, or could not write"
_ENDS = {
    LogEnd.CLOSED: None,
    LogEnd.FULL: "the log was cut off at its largest size",
    LogEnd.OPEN: f"the log was replayed so far, but {_NOT_CLOSED}",
    LogEnd.TORN: f"the log was replayed up to its last line, which is torn, and {_NOT_CLOSED}",
}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `octavo replay`."""
    flags.DEFINE_string(
        "request_id",
        None,
        "Print what happened to this request and why, one JSON object a line. The id is what the "
        "client sent, or what the server made up and told in the event Accepted; `octavo generate "
        "--json` prints it.",
        flag_values=values,
    )


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Replays; returns 0 if every decision was found again and every invariant held.

    A log without an end is no error: of a server that runs or was killed there is no other.
    """
    path = Path(positionals[0])
    try:
        with path.open(encoding="utf-8") as lines:
            found = replay(lines, request_id=values.request_id)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"LOG is {str(path)!r}, which cannot be read: {error}") from error
    except ReplayError as error:
        raise CommandError(f"{path}: {error}") from error
    except AssertionError as error:
        raise CommandError(f"{path}: an invariant does not hold: {error}") from error
    for event in found.story:
        print(json.dumps(event))
    if values.request_id is None:
        print(
            f"{found.num_requests} requests, {found.num_steps} steps, {found.num_events} events: "
            "the same schedule, and all invariants hold"
        )
    if (end := _ENDS[found.end]) is not None:
        print(f"octavo replay: {path}: {end}", file=sys.stderr)
    if values.request_id is not None and not found.story:
        raise CommandError(
            f"{path}: there is no request {values.request_id!r} among {found.num_requests}"
        )
    return 0


COMMAND = Command(
    name="replay",
    summary="Runs the scheduler again from LOG, which `octavo serve --event_log=LOG` wrote, and "
    "checks that it decides the same.",
    positionals=("LOG",),
    define_flags=define_flags,
    run=run,
)

"""`octavo replay`: runs the scheduler again from an event log, and tells one request's story."""

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from ..engine.replay import ReplayError, replay
from .command_line import Command, CommandError, UsageError


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `octavo replay`."""
    flags.DEFINE_string(
        "request_id",
        None,
        "Print what was decided about this request, one JSON object a line.",
        flag_values=values,
    )


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Replays; returns 0 if every decision was found again and every invariant held."""
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
    if values.request_id is not None and not found.story:
        raise CommandError(f"{path}: there is no request {values.request_id!r}")
    if values.request_id is None:
        end = "" if found.is_complete else "; the log was cut off at its largest size"
        print(
            f"{found.num_requests} requests, {found.num_steps} steps, {found.num_events} events: "
            f"the same schedule, and all invariants hold{end}"
        )
    return 0


COMMAND = Command(
    name="replay",
    summary="Runs the scheduler again from an event log and checks that it decides the same.",
    positionals=("LOG",),
    define_flags=define_flags,
    run=run,
)

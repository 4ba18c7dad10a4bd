"""`octavo serve`: a model behind the gRPC interface, until a signal says otherwise."""

import asyncio
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from .command_line import (
    EXIT_FAILURE,
    Command,
    CommandError,
    UsageError,
    check_utf8,
    is_given,
)
from .engine_flags import ALL_FIELDS, define_engine_flags, model_options
from .model_loading import load_model
from .progress import ProgressDisplay
from .scheduling_flags import define_scheduling_flags, scheduling_config
from .server import ServerConfig
from .serving import serve_until_stopped


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `octavo serve`."""
    define_engine_flags(values, ALL_FIELDS)
    define_scheduling_flags(values)
    flags.DEFINE_string(
        "event_log",
        None,
        "New file that gets everything the scheduler is told and decides, for `octavo replay`. It "
        "holds the token ids of prompts and outputs, and of cache salts a digest.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "event_log_max_bytes",
        1 << 30,
        "Size at which the event log ends; the server goes on.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_string(
        "served_model_name",
        None,
        "What clients call the model. Default: the preset's name, or the file's or folder's.",
        flag_values=values,
    )
    flags.DEFINE_string("host", "127.0.0.1", "Interface to listen on.", flag_values=values)
    flags.DEFINE_integer(
        "port",
        50051,
        "Port to listen on; 0 picks a free one.",
        lower_bound=0,
        upper_bound=65535,
        flag_values=values,
    )
    flags.DEFINE_float(
        "withdrawal_grace_s",
        5.0,
        "Seconds after SIGTERM in which health says NOT_SERVING and requests are still taken, so "
        "that load balancers can withdraw; they pass even when nothing runs. Ctrl-C has none.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "drain_timeout_s",
        60.0,
        "Seconds that running requests may go on after that grace; a second signal stops at once.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "stall_timeout_s",
        120.0,
        "Health says NOT_SERVING when requests wait and no step has completed for this many "
        "seconds; more than any step takes.",
        lower_bound=1.0,
        flag_values=values,
    )


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Serves; returns 0 if every request had ended when it stopped."""
    for name in ("withdrawal_grace_s", "drain_timeout_s", "stall_timeout_s"):
        seconds = getattr(values, name)
        if not 0 <= seconds < float("inf"):
            raise UsageError(f"--{name} is {seconds}; it must be 0 or more seconds")
    if values.served_model_name is not None:
        check_utf8("--served_model_name", values.served_model_name)
    options = model_options(
        values,
        ALL_FIELDS,
        served_name=values.served_model_name,
        scheduling=scheduling_config(values),
    )
    if values.event_log is not None:
        options = dataclasses.replace(
            options,
            event_log=Path(values.event_log),
            event_log_max_bytes=values.event_log_max_bytes,
        )
    elif is_given(values, "event_log_max_bytes"):
        raise UsageError("--event_log_max_bytes goes with --event_log")
    most_live = options.engine.max_num_seqs + options.engine.scheduling.max_num_queued
    config = ServerConfig(
        host=values.host,
        port=values.port,
        # Twice what the engine takes: the rest are clients that read the end of their answer, and
        # calls that the engine is about to refuse for a better reason.
        max_concurrent_calls=2 * most_live,
        withdrawal_grace_s=values.withdrawal_grace_s,
        drain_timeout_s=values.drain_timeout_s,
    )
    display = ProgressDisplay(sys.stderr)

    def announce(line: str) -> None:
        display.close()
        print(line, flush=True)

    try:
        is_drained = asyncio.run(
            serve_until_stopped(
                config,
                functools.partial(load_model, options),
                stall_timeout_s=values.stall_timeout_s,
                on_progress=display,
                announce=announce,
            )
        )
    except OSError as error:
        raise CommandError(str(error)) from error
    finally:
        display.close()  # what went wrong is said on a line of its own
    if not is_drained:
        # Loading or running goes on in threads that a normal exit would wait for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_FAILURE)
    return 0


COMMAND = Command(
    name="serve", summary="Serves a model over gRPC.", define_flags=define_flags, run=run
)

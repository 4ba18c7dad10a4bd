"""The command behind bench/device_check.py: runs the parts one after the other within a budget.

This process uses no JAX and so holds no device: every part has processes of its own, which are
started as the same command with --part.
"""

import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from absl import flags

from ..server.command_line import Command, CommandError, UsageError
from . import device_report
from .device_parts import PARTS, Part
from .device_processes import has_accelerator, run_part
from .entry_point import main as run_main

_EXIT_TERMINATED = 128 + signal.SIGTERM


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    flags.DEFINE_string("out", None, "Where the JSON object goes.", flag_values=values)
    flags.DEFINE_float(
        "budget_s",
        450.0,
        "Seconds for all of it; a part that has not ended by then is stopped.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "dry_run",
        False,
        "Small sizes on the CPU: shows faults of this script, and nothing about a device.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "part",
        None,
        [part.name for part in PARTS],
        "For the processes that this one starts: the part whose tasks to run.",
        flag_values=values,
    )
    flags.DEFINE_string("share", "0/1", "Of --part: which of how many shares.", flag_values=values)
    flags.DEFINE_string("records", None, "Of --part: where its records go.", flag_values=values)


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Runs all parts, or as one of their processes a share of one."""
    began_s = time.perf_counter()  # looking for a device may take a minute
    if values.part:
        (part,) = (part for part in PARTS if part.name == values.part)
        index, count = map(int, values.share.split("/"))
        worker = importlib.import_module(".device_worker", __package__)  # brings JAX
        return worker.work(part, index, count, Path(values.records), is_dry_run=values.dry_run)
    if not values.out:
        raise UsageError("--out is missing; it must name a file")
    out = Path(values.out)
    if out.is_dir() or not out.parent.is_dir():
        raise UsageError(f"--out is {values.out!r}; it must name a file in a folder that is there")
    if math.isnan(values.budget_s):
        raise UsageError("--budget_s is nan; it must be a number of seconds")
    if not values.dry_run and not has_accelerator():
        raise CommandError("JAX finds no accelerator here; --dry_run tries the script on the CPU")
    return _check(out, began_s, values.budget_s, is_dry_run=values.dry_run)


def _check(out: Path, began_s: float, budget_s: float, *, is_dry_run: bool) -> int:
    """Runs all parts, writes and prints; 0 if all of it ran and nothing failed."""
    # Asked to end, it stops its processes first: one that went on would hold the device.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_EXIT_TERMINATED))
    report: dict[str, Any] = {"is_dry_run": is_dry_run, "budget_s": budget_s, "sections": {}}

    def spent_s() -> float:
        return time.perf_counter() - began_s

    def note(part: Part, section: dict[str, Any]) -> None:
        report["sections"][part.name] = section
        report["seconds"] = spent_s()
        rated = device_report.with_rates(report)
        # Whole or not at all: this process may be killed at any time.
        beside = out.with_name(out.name + ".new")
        beside.write_text(json.dumps(rated, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, out)

    with TemporaryDirectory() as scratch:
        for part in PARTS:
            print(f"{spent_s():6.1f} s  {part.name} ...", file=sys.stderr, flush=True)
            left_s = budget_s - spent_s()
            if left_s <= 0:
                reason = f"the budget of {budget_s:g} s was spent before it began"
                note(part, device_report.skipped(reason))
                continue
            run_part(
                part,
                Path(scratch),
                limit_s=min(part.limit_s, left_s),
                is_dry_run=is_dry_run,
                on_change=lambda section, part=part: note(part, section),
            )
    rated = device_report.with_rates(report)
    print(device_report.as_text(rated))
    return 0 if device_report.is_good(rated) else 1


COMMAND = Command(
    program="python3",
    name="bench/device_check.py",
    summary="Checks kernels, steps and requests on the accelerator of this machine.",
    define_flags=define_flags,
    run=run,
)


def main() -> int:
    """Runs it on the arguments of this process; returns the exit code."""
    return run_main(COMMAND)

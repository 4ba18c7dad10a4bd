"""`python -m octavo.bench.simulate TABLE`: what the scheduler's policies do, without a device.

Each table runs the real scheduler against planned step times (engine.simulator), prints what was
simulated, the numbers and whether they show what they were to show, and fails if they do not.
"""

import json
import sys
from collections.abc import Callable, Sequence

from absl import flags

from ..server.command_line import Command, UsageError
from .entry_point import main
from .simulate_fairness import fairness
from .simulate_goodput import goodput
from .simulate_million import million
from .simulate_retries import retries
from .simulation_report import Report
from .simulation_setup import COSTS

TABLES: dict[str, Callable[[flags.FlagValues], Report]] = {
    "fairness": lambda values: fairness(
        COSTS[values.costs], _seeds(values), values.seconds or 60.0
    ),
    "goodput": lambda values: goodput(COSTS[values.costs], _seeds(values), values.seconds or 120.0),
    "retries": lambda values: retries(COSTS[values.costs], _seeds(values), values.seconds or 120.0),
    "million": lambda values: million(
        COSTS[values.costs], _seeds(values)[0], values.requests, values.replicas
    ),
}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    flags.DEFINE_enum(
        "costs", "accelerator", sorted(COSTS), "How long steps take.", flag_values=values
    )
    flags.DEFINE_list(
        "seeds",
        ["1", "2", "3"],
        "Seeds of the workload, separated by commas; the table million takes the first.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "seconds",
        None,
        "Simulated seconds of each run, all tables but million. Default: 60 for fairness, else "
        "120.",
        lower_bound=1.0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "requests",
        1_000_000,
        "Requests of the table million.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "replicas",
        64,
        "Replicas of the table million.",
        lower_bound=1,
        upper_bound=9999,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "json", False, "Print one JSON object instead of a table.", flag_values=values
    )


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Simulates and prints; 1 if something does not hold."""
    (name,) = positionals
    if name not in TABLES:
        raise UsageError(f"TABLE is {name!r}; it must be one of {', '.join(TABLES)}")
    report = TABLES[name](values)
    print(json.dumps(report.as_json()) if values.json else report.as_text())
    return 0 if report.holds else 1


def _seeds(values: flags.FlagValues) -> list[int]:
    try:
        seeds = [int(word) for word in values.seeds]
    except ValueError as error:
        raise UsageError(
            f"--seeds is {','.join(values.seeds)}; it must be whole numbers"
        ) from error
    if not seeds:
        raise UsageError("--seeds is empty; it must be at least one whole number")
    return seeds


COMMAND = Command(
    program="python -m",
    name="octavo.bench.simulate",
    summary="Simulates the scheduler: fairness, goodput, retries or million.",
    define_flags=define_flags,
    run=run,
    positionals=("TABLE",),
)


if __name__ == "__main__":
    sys.exit(main(COMMAND))

"""What the state machines share: how they are run, and how their operations are counted.

`python -m tests.engine.state_machine NAME SEED EXAMPLES STEPS` runs one and prints the counts.
"""

import importlib
import json
import sys
from collections import Counter
from functools import partial
from typing import ClassVar
from unittest.mock import patch

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from octavo.engine import scheduler

# Two histories that part after the third token, and one that parts at once: hits are common.
HISTORIES = (
    (1, 2, 1, 1, 2, 2, 1, 2, 1, 1, 1, 2, 2, 1, 1, 2, 1, 2, 2, 2, 1, 1, 2, 1),
    (1, 2, 1, 2, 1, 1, 2, 2, 2, 1, 2, 1, 1, 1, 2, 1, 2, 1, 1, 2, 2, 2, 1, 2),
    (2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
)


class CountedMachine(RuleBasedStateMachine):
    """Counts the operations of all its runs in this process, by name."""

    operations: ClassVar[Counter[str]] = Counter()

    def count(self, name: str) -> None:
        self.operations[name] += 1


def run_machine(
    machine: type[CountedMachine], *, run_seed: int, examples: int, steps: int
) -> Counter[str]:
    """Runs a machine; raises what it found, shrunk. Returns the operations it took, by name."""
    machine.operations.clear()
    run_state_machine_as_test(
        seed(run_seed)(machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,  # the long runs are processes without conftest.py
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Counter(machine.operations)


def few_entries(*, hits: int, rules: int = 256):
    """A patch that lets a step take up so few pages of a cached prefix, and ids of a history.

    Start and stop it.
    """
    step = partial(scheduler.StepDraft, hit_room=hits, rule_room=rules)
    return patch.object(scheduler, "StepDraft", step)


def main() -> None:
    name, *numbers = sys.argv[1:]
    run_seed, examples, steps = map(int, numbers)
    module = importlib.import_module(f"tests.engine.{name.lower()}_machine")
    machine = getattr(module, f"{name}Machine")
    counts = run_machine(machine, run_seed=run_seed, examples=examples, steps=steps)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()

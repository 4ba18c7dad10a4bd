"""What the state machines share: how they are run, and how their operations are counted."""

from collections import Counter
from typing import ClassVar

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

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
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Counter(machine.operations)

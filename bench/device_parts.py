"""The parts of the device check: where their tasks are, and what each may take. No JAX.

A part's module has a function `tasks(is_dry_run)` that gives its tasks by name; a task returns what
it found, as a JSON object. Findings that have a meaning for every part:

- failures: what is wrong, in words; without any, the task is done.
- seconds_per_call with bytes or flops: become rates, and shares of what the device was measured to
  do.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Findings = dict[str, Any]
Tasks = Mapping[str, Callable[[], Findings]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part.

    Attributes:
      name: Of its section.
      module: Where its tasks are. A name, because importing it brings JAX.
      limit_s: Seconds after which it is stopped, whatever the budget.
      processes: Most processes that share its tasks.
    """

    name: str
    module: str
    limit_s: float
    processes: int = 1

    def tasks(self, *, is_dry_run: bool) -> Tasks:
        """Its tasks; small ones for a dry run."""
        return importlib.import_module(self.module).tasks(is_dry_run)


# Compiling a kernel is one to three seconds of Python, which threads of one process would do one
# after the other.
PARTS = (
    Part(name="device", module="octavo.bench.device_bandwidth", limit_s=60.0),
    Part(
        name="correctness",
        module="tests.pallas_kernels.device_correctness",
        limit_s=200.0,
        processes=12,
    ),
    Part(name="kernels", module="octavo.bench.device_kernels", limit_s=120.0),
    Part(name="decode_step", module="octavo.bench.device_decode", limit_s=150.0),
    Part(name="serving", module="octavo.bench.device_serving", limit_s=120.0),
)

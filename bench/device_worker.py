"""A process of the device check: runs its share of a part's tasks, and records each as it goes.

A process that failed a task is not trusted with the next one, because a kernel that reads a wrong
address breaks whatever the process does on the device from then on. It ends, and the next process
with the same records goes on behind that task.
"""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import jax

from .device_parts import Findings, Part
from .device_records import Record, read_records

_MAX_ERROR = 2000  # characters


def work(part: Part, index: int, count: int, records: Path, *, is_dry_run: bool) -> int:
    """Runs tasks index, index + count, ... of a part that no process before this one began.

    Args:
      part: The part.
      index: Of the share.
      count: Of all shares.
      records: A JSON object a line is added here: first which tasks there are, and on what; then
        that a task began, and what it found.
      is_dry_run: Whether the tasks are small, and on the CPU.

    Returns:
      0 when all tasks were begun and this process failed none; else 1.
    """
    device = jax.devices()[0]
    if device.platform == "cpu" and not is_dry_run:
        raise RuntimeError("there is no accelerator here, only the CPU")
    begun = {record["began"] for record in read_records(records) if "began" in record}
    with records.open("a", encoding="utf-8") as file:

        def write(record: Record) -> None:
            print(json.dumps(record), file=file, flush=True)

        tasks = dict(list(part.tasks(is_dry_run=is_dry_run).items())[index::count])
        write(
            {
                "tasks": list(tasks),
                "platform": device.platform,
                "device_kind": device.device_kind,
                "jax": jax.__version__,
            }
        )
        for name, run in tasks.items():
            if name in begun:
                continue
            write({"began": name})
            found, has_raised = _run(run)
            write({"task": name, **found})
            if has_raised:
                return 1
    return 0


def _run(run: Callable[[], Findings]) -> tuple[Findings, bool]:
    """What a task found, and whether it raised."""
    began_s = time.perf_counter()
    try:
        found, has_raised = run(), False
    # Whatever it is: the next task may be fine, and the records say what happened.
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        failure = f"{type(error).__name__}: {error}"[:_MAX_ERROR]
        found = {"failures": [failure], "traceback": text[-_MAX_ERROR:]}
        has_raised = True
    return {"seconds": time.perf_counter() - began_s, **found}, has_raised

"""The process that compiles one job: reads it from standard input, writes the answer to a file.

    python -m octavo.engine.plan_worker SCRATCH

SCRATCH is the folder that `aot_environment.environment` was given. Progress goes to standard
output, `done total` a line. A process of its own, because what is set before JAX starts differs
from chip to chip, and because a compiler that aborts takes its process along. It ends with the one
that started it, whose death closes standard input.
"""

import dataclasses
import os
import pickle
import shutil
import sys
from pathlib import Path
from threading import Thread

from . import plan_ptxas
from .aot_devices import aot_devices
from .aot_environment import ptxas_logs
from .plan_compile import compile_plan
from .plan_records import ANSWER_FILE, REFUSAL_FILE, PlanJob, plan_to_json


def main() -> None:
    """Compiles, and answers."""
    scratch = Path(sys.argv[1])
    job = pickle.load(sys.stdin.buffer)
    assert isinstance(job, PlanJob)
    Thread(target=_end_with_the_other, args=(scratch,), daemon=True).start()
    try:
        plan = compile_plan(job, aot_devices(job.devices), _tell)
    except ValueError as error:
        (scratch / REFUSAL_FILE).write_text(str(error), encoding="utf-8")
        return
    if job.devices.chip.platform == "gpu":
        logs = (log.read_text("utf-8", "replace") for log in ptxas_logs(scratch).iterdir())
        plan = dataclasses.replace(plan, kernels=plan_ptxas.kernels(logs))
    (scratch / ANSWER_FILE).write_text(plan_to_json(plan), encoding="utf-8")


def _end_with_the_other(scratch: Path) -> None:
    """Waits until nobody is there any more who could want the answer."""
    os.read(sys.stdin.fileno(), 1)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def _tell(done: int, total: int) -> None:
    print(done, total, flush=True)


if __name__ == "__main__":
    main()

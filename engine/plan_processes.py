"""Runs the compilers: one process for each job, as many at a time as there are cores. No JAX."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from threading import Event

from .aot_environment import environment, missing_extra
from .plan_records import ANSWER_FILE, REFUSAL_FILE, CompiledPlan, PlanJob, plan_from_json

OnStep = Callable[[PlanJob, int, int], None]
"""Told of which job how many steps are compiled, and how many will be; from any thread."""

_MAX_SAID = 600  # characters of what a process that failed said last


class PlanFailed(Exception):
    """A job has no answer; the message says why not."""


def run_jobs(
    jobs: Sequence[PlanJob], on_step: OnStep
) -> Iterator[tuple[PlanJob, CompiledPlan | PlanFailed]]:
    """Each job with its answer, or with why it has none, in the order in which they are done."""
    processes: list[subprocess.Popen[bytes]] = []
    is_over = Event()
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        pending = {pool.submit(_run, job, on_step, processes, is_over): job for job in jobs}
        for future in as_completed(pending):
            try:
                yield pending[future], future.result()
            except PlanFailed as error:
                yield pending[future], error
    finally:
        is_over.set()
        for process in processes:
            process.kill()
        pool.shutdown(cancel_futures=True)  # when each has removed its folder


def _run(
    job: PlanJob, on_step: OnStep, processes: list[subprocess.Popen[bytes]], is_over: Event
) -> CompiledPlan:
    extra = missing_extra(job.devices.chip.platform)
    if extra is not None:
        raise PlanFailed(
            f"octavo plan --chips={job.devices} needs the compiler of octavo[{extra}]; in a clone, "
            "`make plan-env` makes .cache/plan-venv, which has it"
        )
    with tempfile.TemporaryDirectory(prefix="octavo-plan-") as folder:
        scratch = Path(folder)
        with (scratch / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                _command(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment(job.devices, scratch, os.environ),
                start_new_session=True,  # it ends when its input does, and not by a Ctrl-C
            )
        processes.append(process)
        if is_over.is_set():  # since before it was in the list, perhaps
            process.kill()
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as stdin, process.stdout as stdout:
            with suppress(BrokenPipeError):  # it ended already, and its exit code says so
                stdin.write(pickle.dumps(job))
                stdin.flush()
            for line in stdout:
                words = line.split()  # compilers may print, too
                if len(words) == 2 and all(map(bytes.isdigit, words)):
                    on_step(job, int(words[0]), int(words[1]))
        code = process.wait()
        answer, refusal = scratch / ANSWER_FILE, scratch / REFUSAL_FILE
        if refusal.exists():
            raise PlanFailed(refusal.read_text(encoding="utf-8"))
        if code or not answer.exists():
            said = (scratch / "stderr").read_text("utf-8", "replace").split()
            last = " ".join(said)[-_MAX_SAID:]
            raise PlanFailed(f"the compiler's process ended with {code}: {last}")
        return plan_from_json(answer.read_text(encoding="utf-8"))


def _command(folder: str) -> list[str]:
    return [sys.executable, "-m", f"{__package__}.plan_worker", folder]

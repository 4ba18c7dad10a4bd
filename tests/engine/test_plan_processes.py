"""Processes that compile: one for each job.

Breaks when one that dies takes others along, dies without a word, or outlives who asked.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from octavo.engine import plan_processes
from octavo.engine.plan_processes import PlanFailed, run_jobs
from octavo.engine.plan_records import PlanJob, plan_to_json

from .plan_examples import PLAN, make_job


def ignore_step(job: PlanJob, done: int, total: int) -> None:
    """Nobody waits."""


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Lets other code run where the compilers would."""

    def command(folder: str) -> list[str]:
        return [sys.executable, "-c", code, folder]

    monkeypatch.setattr(plan_processes, "_command", command)


WORKERS = {
    "import sys; sys.stderr.write('LLVM ERROR: cannot select'); sys.exit(3)": (
        "the compiler's process ended with 3: LLVM ERROR: cannot select"
    ),
    "import os; os.abort()": "the compiler's process ended with -6",
    "pass": "the compiler's process ended with 0",
    "import sys; open(sys.argv[1] + '/refusal.txt', 'w').write('attention is no')": (
        "attention is no"
    ),
}


@pytest.mark.parametrize("code", WORKERS)
def test_a_compiler_that_dies_takes_nobody_along(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    stand_in(monkeypatch, code)
    ((job, failed),) = run_jobs([make_job()], ignore_step)
    assert job == make_job()
    assert isinstance(failed, PlanFailed)
    assert str(failed).startswith(WORKERS[code])


def test_an_answer_and_the_way_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What compilers print on the way is no progress."""
    (tmp_path / "answer").write_text(plan_to_json(PLAN))
    code = (
        "import os, pickle, shutil, sys\n"
        "job = pickle.load(sys.stdin.buffer)\n"
        "print(f'{job.devices} is compiled'); print(); print(1, 4, flush=True)\n"
        "print(os.environ['JAX_PLATFORMS'], 1)\n"
        f"shutil.copy({str(tmp_path / 'answer')!r}, sys.argv[1] + '/answer.json')\n"
    )
    stand_in(monkeypatch, code)
    told: list[tuple[str, int, int]] = []

    def tell(job: PlanJob, done: int, total: int) -> None:
        told.append((str(job.devices), done, total))

    answers = list(run_jobs([make_job()], tell))
    assert answers == [(make_job(), PLAN)]
    assert told == [("cpu-1", 1, 4)]


def test_nothing_is_left_of_a_plan_that_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a process nor a folder; and those that have not begun do not begin."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stand_in(monkeypatch, "import os, time; print(os.getpid(), 1, flush=True); time.sleep(600)")
    pids: list[int] = []

    def interrupt(job: PlanJob, done: int, total: int) -> None:
        pids.append(done)
        if done == pids[0]:
            os.kill(os.getpid(), signal.SIGINT)

    jobs = [make_job(f"cpu-{count}") for count in range(1, 9)]
    with pytest.raises(KeyboardInterrupt):
        list(run_jobs(jobs, interrupt))
    assert list(tmp_path.iterdir()) == []
    assert 1 <= len(pids) < len(jobs)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_compiler_ends_with_who_asked(tmp_path: Path) -> None:
    """However that ended: the kernel closes the pipe for the dead."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = plan_processes._command(str(scratch))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(pickle.dumps(make_job()))
        worker.stdin.flush()
        assert worker.stdout.readline().startswith(b"0 ")
        worker.stdin.close()
        assert worker.wait(60) == 1
    assert not scratch.exists()


def test_a_missing_extra_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_processes, "missing_extra", "plan-{}".format)
    ((_, failed),) = run_jobs([make_job("v5e-8")], ignore_step)
    assert str(failed) == (
        "octavo plan --chips=v5e-8 needs the compiler of octavo[plan-tpu]; in a clone, "
        "`make plan-env` makes .cache/plan-venv, which has it"
    )

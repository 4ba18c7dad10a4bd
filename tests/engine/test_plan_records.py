"""What travels between processes and stays on disk: records, the cache of answers, processes.

Breaks when an answer is taken for one to another question, or gets lost without a word.
"""

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from octavo.configs.chips import parse_chips
from octavo.configs.engine_config import EngineConfig
from octavo.configs.presets import load_preset
from octavo.engine import plan_cache, plan_processes
from octavo.engine.plan_cache import job_key, read_answer, write_answer
from octavo.engine.plan_hlo import Collective
from octavo.engine.plan_processes import PlanFailed, run_jobs
from octavo.engine.plan_ptxas import Kernel
from octavo.engine.plan_records import (
    CompiledPlan,
    PlanJob,
    PlannedStep,
    plan_from_json,
    plan_to_json,
)


def make_job(chips: str = "cpu-1") -> PlanJob:
    (devices,) = parse_chips(chips)
    model = load_preset("llama-3.2-1b").architecture
    assert model is not None
    return PlanJob(
        model=model,
        config=EngineConfig(tensor_parallel_size=devices.count),
        devices=devices,
        host_pool_bytes=0,
        compiles_all=False,
        max_layers=32,
    )


PLAN = CompiledPlan(
    attention="reference",
    parameter_bytes=1,
    slot_bytes=2,
    page_bytes=3,
    num_pages=4,
    max_model_len=5,
    num_executables=6,
    steps=(
        PlannedStep(
            rows=1,
            chunk=0,
            compile_s=0.5,
            temporary_bytes=7,
            program_bytes=8,
            collectives=(Collective(kind="all-reduce", bytes=9, count=10),),
            cache_copies=("copy bf16[2]{0}",),
        ),
    ),
    kernels=(Kernel(name="k", architecture="sm_90a", registers=1, spill_bytes=2, shared_bytes=3),),
)


def test_an_answer_comes_back_as_it_was() -> None:
    assert plan_from_json(plan_to_json(PLAN)) == PLAN


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"steps": [{}], "kernels": []}'])
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no plan: "):
        plan_from_json(text)


def test_an_answer_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert read_answer(folder, "key") is None
    write_answer(folder, "key", PLAN)
    assert read_answer(folder, "key") == PLAN
    assert [path.name for path in folder.iterdir()] == ["key.json"]


def test_a_torn_answer_is_compiled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "key.json").write_text(plan_to_json(PLAN)[:50])
    assert read_answer(tmp_path, "key") is None
    assert "compiling again" in caplog.text


def test_a_cache_that_cannot_be_written_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    write_answer(tmp_path / "file" / "plan", "key", PLAN)
    assert "the answer is not kept" in caplog.text


CHANGES: dict[str, Callable[[PlanJob], PlanJob]] = {
    "model": lambda job: dataclasses.replace(
        job, model=dataclasses.replace(job.model, rope_theta=1e4)
    ),
    "config": lambda job: dataclasses.replace(
        job, config=dataclasses.replace(job.config, page_size=32)
    ),
    "devices": lambda job: dataclasses.replace(job, devices=make_job("cpu-2").devices),
    "chip": lambda job: dataclasses.replace(
        job,
        devices=dataclasses.replace(
            job.devices, chip=dataclasses.replace(job.devices.chip, topologies={1: "1x1"})
        ),
    ),
    "memory": lambda job: dataclasses.replace(job, host_pool_bytes=1),
    "steps": lambda job: dataclasses.replace(job, compiles_all=True),
    "layers": lambda job: dataclasses.replace(job, max_layers=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_question_has_another_name(change: str) -> None:
    job = make_job()
    assert job_key(job) == job_key(make_job())
    assert job_key(CHANGES[change](job)) != job_key(job)


def test_other_sources_and_versions_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job()
    before = job_key(job)

    def other(folders: Sequence[str]) -> bytes:
        assert {*folders} >= {"configs", "engine", "models", "pallas_kernels"}
        return b"other"

    monkeypatch.setattr(plan_cache, "source_digest", other)
    changed = job_key(job)
    assert changed != before
    monkeypatch.setattr(plan_cache.importlib.metadata, "version", {"jax": "0"}.get)
    assert job_key(job) not in (before, changed)


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64"])
def test_other_settings_of_compilers_have_another_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    keys = set[str]()
    for value in ("", "1", "2"):
        monkeypatch.setenv(name, value)
        keys.add(job_key(make_job()))
    assert len(keys) == 3


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
    assert str(failed) == "octavo plan --chips=v5e-8 needs pip install 'octavo[plan-tpu]'"

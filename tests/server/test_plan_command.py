"""`octavo plan` from the command line: what it prints, keeps and refuses.

The compiler of this machine's CPU is a compiler like all others, so most is shown with that.
Breaks when an answer is not the one to the question, or a refusal does not say what to do.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.engine import plan_processes
from octavo.engine.plan_hlo import Collective
from octavo.engine.plan_ptxas import Kernel
from octavo.engine.plan_records import CompiledPlan, PlanJob, PlannedExecutable
from octavo.server import plan_command
from octavo.server.main import main
from tests.models.tiny_checkpoints import huggingface_config, tiny_config

GIB = 2**30
STEP = PlannedExecutable(
    rows=32,
    chunk=0,
    compile_s=1.5,
    temporary_bytes=2**20,
    program_bytes=2**21,
    collectives=(Collective(kind="all-reduce", bytes=2**22, count=65),),
    cache_copies=(),
)
PLAN = CompiledPlan(
    attention="gpu",
    parameter_bytes=2 * GIB,
    slot_bytes=GIB,
    page_bytes=2**18,
    num_pages=40_001,
    max_model_len=131_072,
    num_executables=13,
    executables=(dataclasses.replace(STEP, chunk=256), STEP),
    kernels=(
        Kernel(name="plain", architecture="sm_90a", registers=64, spill_bytes=0, shared_bytes=0),
        Kernel(name="octavo_x", architecture="sm_90a", registers=9, spill_bytes=0, shared_bytes=0),
        Kernel(name="spills", architecture="sm_90a", registers=255, spill_bytes=8, shared_bytes=1),
    ),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[PlanJob]:
    """What would have been compiled; the answer is PLAN for all but a100-1, where there is none."""
    asked: list[PlanJob] = []

    def run_jobs(jobs: Sequence[PlanJob], on_step: plan_processes.OnStep) -> Iterator[Any]:
        asked.extend(jobs)
        for job in reversed(jobs):  # they end in any order
            on_step(job, 1, 4)
            failed = plan_processes.PlanFailed("no compiler")
            yield job, (failed if str(job.devices) == "a100-1" else PLAN)

    monkeypatch.setattr(plan_command, "run_jobs", run_jobs)
    return asked


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Any]]:
    """The exit code, and `chips` of the object in the last line."""
    code = main(["plan", "--json", *arguments])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(document) == {"model", "chips"}
    return code, document["chips"]


@pytest.mark.usefixtures("cache", "types_unchecked")
def test_every_chip_has_its_answer_in_order(
    capsys: pytest.CaptureFixture[str], compiled: list[PlanJob]
) -> None:
    code, chips = plan_json(capsys, "--model=llama-3.1-8b", "--chips=h100-8,a100-1,v5e-1")
    assert code == 1  # not all are ok
    assert [(chip["chip"], chip["ok"]) for chip in chips] == [
        ("h100-8", True),
        ("a100-1", False),
        ("v5e-1", True),
    ]
    assert chips[1]["reason"] == "no compiler"
    assert [job.config.tensor_parallel_size for job in compiled] == [8, 1, 1]
    h100 = chips[0]
    assert (h100["compiled_layers"], h100["is_extrapolated"]) == (32, False)
    assert h100["memory"]["kv_bytes"] == 40_001 * 2**18
    assert h100["memory"]["program_bytes"] == 13 * 2**21  # all of them, though two are known
    # 16 tokens a page; the last token needs no place: 64 pages hold 1025 tokens.
    assert h100["requests"][0] == {"context_tokens": 1024, "requests": 40_000 // 64}
    assert h100["requests"][-1] == {"context_tokens": 131_072, "requests": 4}
    assert {bound["limited_by"] for bound in h100["tpot_bounds"]} <= {"memory", "flops", "links"}
    # Rows that the pages cannot hold at a context have no bound there.
    assert max(b["rows"] for b in h100["tpot_bounds"] if b["context_tokens"] == 131_072) == 2
    assert max(b["rows"] for b in h100["tpot_bounds"] if b["context_tokens"] == 1024) == 32
    assert [bound["prompt_tokens"] for bound in h100["ttft_bounds"]][-1] == 131_071


@pytest.mark.usefixtures("cache", "types_unchecked")
def test_answers_are_kept_until_they_are_wanted_fresh(
    capsys: pytest.CaptureFixture[str], compiled: list[PlanJob]
) -> None:
    arguments = ("--model=llama-3.1-8b", "--chips=h100-8,a100-1")
    first = plan_json(capsys, *arguments)
    assert len(compiled) == 2
    assert plan_json(capsys, *arguments) == first
    # What had no answer is asked again: an extra may have been installed.
    assert [str(job.devices) for job in compiled[2:]] == ["a100-1"]
    plan_json(capsys, *arguments, "--fresh")
    assert len(compiled) == 5
    plan_json(capsys, *arguments, "--page_size=32")
    assert len(compiled) == 7
    plan_json(capsys, *arguments, "--all")
    assert len(compiled) == 9


@pytest.mark.usefixtures("types_unchecked")
def test_a_compilers_failure_is_not_kept(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is no property of the model."""
    plan = dataclasses.replace(PLAN, reason="does not compile: OSError: disk full", failed=True)

    def run_jobs(jobs: Sequence[PlanJob], _: plan_processes.OnStep) -> Iterator[Any]:
        yield from ((job, plan) for job in jobs)

    monkeypatch.setattr(plan_command, "run_jobs", run_jobs)
    code, (chip,) = plan_json(capsys, "--model=llama-3.1-8b", "--chips=h100-1")
    assert (code, chip["reason"]) == (1, plan.reason)
    assert not cache.exists()


@pytest.mark.usefixtures("compiled", "types_unchecked")
def test_an_answer_of_other_sources_is_not_kept(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody edits while it compiles: what was compiled is not what the name says."""
    keys = iter(["before", "after"])

    def job_key(_: PlanJob) -> str:
        return next(keys)

    monkeypatch.setattr(plan_command, "job_key", job_key)
    assert plan_json(capsys, "--model=llama-3.1-8b", "--chips=h100-1")[0] == 0
    assert not cache.exists()


@pytest.mark.usefixtures("cache", "compiled", "types_unchecked")
def test_the_table_says_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model=llama-3.1-70b", "--chips=h100-8,a100-1"]) == 1
    out, err = capsys.readouterr()
    assert "h100-8  ok     2.00  9.77" in out
    assert "a100-1: no compiler" in out
    assert "extrapolated: of 80 layers one and two were compiled" in out
    assert "2 of 13 executables compiled; penalties, bias, masks and log-probabilities" in out
    assert "65 all-reduce of 4.00 MiB" in out
    assert "3 kernels, 1 that spill, at most 255 registers" in out
    assert ("spills" in out, "octavo_x" in out, "plain" in out) == (True, True, False)
    assert "lower bounds from bytes and flops at the makers' peaks; unmeasured" in " ".join(
        out.split()
    )
    assert max(map(len, out.splitlines())) <= 100
    assert "h100-8: compiling 1 of 4\n" in err


@pytest.mark.usefixtures("cache", "types_unchecked")
def test_extras_that_are_not_there_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_processes, "missing_extra", {"tpu": "plan-tpu", "gpu": "plan-gpu"}.get)
    code, chips = plan_json(capsys, "--model=llama-3.1-8b", "--chips=v5e-8,h100-1")
    assert code == 1
    for chip, extra in zip(chips, ("octavo[plan-tpu]", "octavo[plan-gpu]"), strict=True):
        needs = f"octavo plan --chips={chip['chip']} needs the compiler of {extra}; "
        assert chip["reason"].startswith(needs)


@pytest.mark.usefixtures("cache", "types_unchecked")
def test_a_folder_without_weights_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way, through the process that compiles; then what does not fit, by how much."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    config = tiny_config()
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(huggingface_config(config)))
    sizes = ("--deterministic", "--max_num_seqs=2", "--prefill_chunk_tokens=16")
    plan = (f"--model={folder}", "--chips=cpu-1", *sizes)
    config_file = f"--model={folder / 'config.json'}"
    code, (chip,) = plan_json(capsys, *plan)
    assert (code, chip["reason"], chip["ok"]) == (0, "", True)
    assert (chip["num_pages"], chip["max_model_len"]) == (2 * 16 + 1, config.max_position)
    (step,) = chip["executables"]
    assert (step["rows"], step["chunk"], step["cache_copies"]) == (2, 16, [])
    assert step["temporary_bytes"] > 0
    assert chip["tpot_bounds"] == []  # nobody says how fast this CPU is

    taken = sum(chip["memory"][name] for name in ("parameter_bytes", "slot_bytes"))
    code, (chip,) = plan_json(capsys, config_file, *plan[1:], f"--device_memory_bytes={taken}")
    assert (code, chip["ok"], chip["executables"]) == (1, False, [])
    assert chip["memory"]["missing_bytes"] == 2 * chip["memory"]["page_bytes"]
    assert chip["reason"] == "does not fit: each device lacks 1 MiB"  # rounded up


@pytest.mark.usefixtures("cache", "types_unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--chips=h101-1", "--chips is 'h101-1'; no chip is called 'h101'"),
        ("--chips=tpu7x-1", "--chips is 'tpu7x-1'; the number of tpu7x devices must be one of"),
        ("--chips=", "--chips is ''; '' must be NAME-COUNT"),
        ("--model=", "--model is ''; it must be a preset"),
        ("--model=/no/such/file", "--model is '/no/such/file'; it must be a preset (llama-3.1-70b"),
        ("--max_num_seqs=0", "--max_num_seqs is 0; it must be"),
        ("--compilation_cache_dir=x", "Unknown command line flag 'compilation_cache_dir'"),
        ("--tensor_parallel_size=2", "Unknown command line flag 'tensor_parallel_size'"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert main(["plan", arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("octavo plan: error: ")
    assert message in err

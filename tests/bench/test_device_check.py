"""The device check on the CPU: a fault of the script shows before there is a device to run it on.

What would break it: a part that raises, a section or a number that is missing, a part or task that
is left out without a word, one that takes the others with it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.bench import device_check, device_command, device_processes, device_report
from octavo.bench.device_parts import PARTS, Part
from octavo.bench.device_records import Section, ShareRecords, section_of
from octavo.bench.device_serving import Answer, compare
from octavo.models.fetch import default_cache_dir
from octavo.server.command_line import run_command
from tests.pallas_kernels.device_correctness import DRY_RUN

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "device_check.py"
# Of our own environment: what neither device_check.NEEDED names nor comes with it.
NOT_NEEDED = (
    *("beartype", "gguf", "grpc", "hypothesis", "jinja2", "jsonschema", "llguidance", "pytest"),
    *("safetensors", "sentencepiece", "tokenizers"),
)


def start(out: Path, *flags: str) -> subprocess.Popen[str]:
    """Starts the script as on a bare machine: from another folder, with nothing on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "JAX_COMPILATION_CACHE_DIR": str(default_cache_dir() / "compiled-by-tests"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), f"--out={out}", *flags],
        cwd=out.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(out: Path, *flags: str) -> tuple[int, str, dict[str, Any]]:
    """Runs it to its end: exit code, what it printed, and the report."""
    with start(out, *flags) as process:
        stdout, stderr = process.communicate()
    assert out.exists(), stderr
    return process.returncode, stdout, json.loads(out.read_text())


def read_report(out: Path) -> dict[str, Any]:
    """The report so far."""
    return json.loads(out.read_text()) if out.exists() else {"sections": {}}


def test_it_needs_no_package_that_it_does_not_name() -> None:
    """Fails if a part imports what only our own environment has: it would not start elsewhere."""
    parts = [part.module for part in PARTS]
    code = (
        f"import importlib, sys; sys.modules |= dict.fromkeys({NOT_NEEDED}); "
        f"[*map(importlib.import_module, {parts})]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_dry_run_finds_nothing_wrong_and_says_what_it_found(tmp_path: Path) -> None:
    code, summary, report = check(tmp_path / "found.json", "--dry_run")
    assert code == 0, summary
    sections = report["sections"]
    assert list(sections) == [part.name for part in PARTS]
    for name, section in sections.items():
        assert section["status"] == "done", name
        assert section["platform"] == "cpu", "numbers without what they are of"
        assert section["tasks"]
        assert all(task["status"] == "done" for task in section["tasks"].values())
        assert f"\n{name}: done" in summary
    assert sections["device"]["tasks"]["copy"]["bytes_per_s"] > 0
    assert sections["correctness"]["tasks"].keys() == {str(shape) for shape in DRY_RUN}
    for task in sections["correctness"]["tasks"].values():
        assert 0 < task["worst_error"] < 3e-2
        assert task["cases"] >= 7
    kernels = sections["kernels"]["tasks"]
    assert any("bytes_per_s" in task and task["of_copy"] > 0 for task in kernels.values())
    assert any("flops_per_s" in task and task["of_matmul"] > 0 for task in kernels.values())
    for task in sections["decode_step"]["tasks"].values():
        assert {"step_ms", "tokens_per_s", "compile_s", "of_copy", "bytes_in_use"} <= task.keys()
    requests = sections["serving"]["tasks"]["requests"]
    assert requests["compile_events_after_ready"] == 0
    assert requests["equal_ids"] > 0
    assert "dry run, which says nothing about a device" in summary


def test_a_part_past_the_budget_is_reported_as_skipped(tmp_path: Path) -> None:
    code, summary, report = check(tmp_path / "found.json", "--dry_run", "--budget_s=0")
    assert code == 1
    assert list(report["sections"]) == [part.name for part in PARTS]
    for section in report["sections"].values():
        assert section["status"] == "skipped"
        assert "budget of 0 s" in section["reason"]
    assert "correctness skipped" in summary


def test_looking_for_a_device_is_part_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the clock starts behind the probe, which may take a minute."""

    def find_slowly() -> bool:
        time.sleep(0.1)
        return True

    def begin_a_part(*_: Any, **__: Any) -> None:
        pytest.fail("a part began")

    def keep_handlers(*_: Any) -> None:  # of this process
        pass

    monkeypatch.setattr(device_command, "has_accelerator", find_slowly)
    monkeypatch.setattr(device_command, "run_part", begin_a_part)
    monkeypatch.setattr(signal, "signal", keep_handlers)
    out = tmp_path / "found.json"
    assert run_command(device_command.COMMAND, [f"--out={out}", "--budget_s=0.05"]) == 1
    report = read_report(out)
    assert {section["status"] for section in report["sections"].values()} == {"skipped"}
    assert report["seconds"] > 0.1


def test_without_an_accelerator_it_says_so_at_once(tmp_path: Path) -> None:
    with start(tmp_path / "found.json") as process:
        _, stderr = process.communicate()
    assert process.returncode == 1
    assert stderr.splitlines()[-1].endswith("--dry_run tries the script on the CPU")
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--out={}", "--out is '{}'; it must name a file"),
        ("--out={}/none/found.json", "--out is '{}/none/found.json'; it must name a file"),
        ("--budget_s=nan", "--budget_s is nan; it must be a number of seconds"),
    ],
)
def test_what_it_cannot_do_it_says_before_it_begins(
    tmp_path: Path, flag: str, message: str
) -> None:
    with start(tmp_path / "found.json", "--dry_run", flag.format(tmp_path)) as process:
        _, stderr = process.communicate()
    assert process.returncode == 2
    assert message.format(tmp_path) in stderr
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_a_cpu_are_never_taken_for_those_of_a_device(tmp_path: Path) -> None:
    """Where JAX could tell only later that there is none."""
    records = tmp_path / "records"
    with start(tmp_path / "found.json", f"--part={PARTS[0].name}", f"--records={records}") as part:
        _, stderr = part.communicate()
    assert part.returncode == 1
    assert "there is no accelerator here" in stderr
    assert not records.exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OLDEST_PYTHON", (99, 0), "it must be 3.12 or newer"),
        ("NEEDED", ("json", "no_such", "nor_this"), "this Python has no no_such, nor_this"),
    ],
)
def test_what_a_python_lacks_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: object,
    words: str,
) -> None:
    monkeypatch.setattr(device_check, name, value)
    assert device_check.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_who_ends_it_keeps_what_was_found_and_nothing_that_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    with start(out, "--dry_run") as process:
        while "device" not in (sections := read_report(out)["sections"]) or (
            sections["device"]["status"] == "running"
        ):
            assert process.poll() is None
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(30)
    assert process.returncode == 128 + signal.SIGTERM
    assert read_report(out)["sections"]["device"]["status"] == "done"
    assert not any(child.is_running() for child in children)


# Tasks of a part that misbehave; Python finds them by the name of a module beside the test's data.
_TASKS = """
import os, sys, time
def tasks(is_dry_run):
    def raises(): raise ValueError("a planted fault")
    def dies(): os.abort()
    def hangs(): time.sleep(600)
    def began(): return '"began"' in open(sys.argv[3].removeprefix("--records=")).read()
    good = dict
    return {names}
"""


def run_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, limit_s: float = 60.0
) -> Section:
    """The last section of a part with these tasks, run in processes as any other."""
    (tmp_path / "planted_tasks.py").write_text(_TASKS.replace("{names}", names))
    part = Part(name="planted", module="planted_tasks", limit_s=limit_s)
    runner = tmp_path / "runner.py"
    runner.write_text(
        "import sys, pathlib\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from octavo.bench import device_parts, device_worker\n"
        f"part = device_parts.{part!r}\n"
        "records = sys.argv[3].removeprefix('--records=')\n"
        "sys.exit(device_worker.work(part, 0, 1, pathlib.Path(records), is_dry_run=True))\n"
    )
    monkeypatch.setattr(device_processes, "_SCRIPT", runner)
    sections: list[Section] = []
    device_processes.run_part(
        part, tmp_path, limit_s=limit_s, is_dry_run=True, on_change=sections.append
    )
    return sections[-1]


def test_a_task_that_raises_or_dies_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = '{"first": raises, "second": good, "third": dies, "fourth": good}'
    section = run_tasks(tmp_path, monkeypatch, names)
    statuses = {name: task["status"] for name, task in section["tasks"].items()}
    assert statuses == {"first": "failed", "second": "done", "third": "failed", "fourth": "done"}
    assert section["status"] == "failed"
    raised, died = section["failures"]
    assert raised == "first: ValueError: a planted fault"
    assert died.startswith("third: its process ended with -6")


@pytest.mark.full
def test_a_task_that_hangs_is_stopped_and_the_rest_is_reported_as_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = '{"first": good, "second": hangs, "third": good}'
    section = run_tasks(tmp_path, monkeypatch, names, limit_s=15.0)
    statuses = {name: task["status"] for name, task in section["tasks"].items()}
    assert statuses == {"first": "done", "second": "failed", "third": "skipped"}
    assert section["failures"] == ["second: stopped 15.0 s into the part"]


def test_a_part_whose_tasks_cannot_be_listed_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = run_tasks(tmp_path, monkeypatch, "undefined_name")
    assert section["status"] == "failed"
    assert "name 'undefined_name' is not defined" in section["failures"][0]


def test_a_process_that_cannot_take_over_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where what a kernel broke outlives its process."""
    names = '{"first": raises, "second": good} if not began() else broken'
    section = run_tasks(tmp_path, monkeypatch, names)
    assert section["tasks"]["second"]["status"] == "skipped"
    assert section["failures"][0] == "first: ValueError: a planted fault"
    assert "name 'broken' is not defined" in section["failures"][1]


def records(*ended: Mapping[str, Any], begun: int) -> list[dict[str, Any]]:
    """Of a share with the tasks a, b and c."""
    lines: list[dict[str, Any]] = [{"tasks": ["a", "b", "c"], "platform": "gpu"}]
    lines += [{"began": name} for name in "abc"[:begun]]
    return lines + [{"task": name, **found} for name, found in zip("abc", ended, strict=False)]


def test_a_section_of_tasks_that_did_not_begin_is_skipped_and_no_failure() -> None:
    share = ShareRecords(records=records({}, {}, begun=2))
    section = section_of([share], seconds=9.0, stopped_after_s=9.0)
    assert (section["status"], section["failures"]) == ("skipped", [])
    assert section["tasks"]["c"]["status"] == "skipped"
    report = {"sections": {"part": section}, "is_dry_run": False}
    assert not device_report.is_good(report)
    assert "2 done, 0 failed, 1 skipped" in device_report.as_text(report)


def test_failures_are_named_and_shown() -> None:
    share = ShareRecords(records=records({}, {"failures": ["NaN"]}, {}, begun=3))
    section = section_of([share], seconds=9.0, stopped_after_s=None)
    assert (section["status"], section["failures"]) == ("failed", ["b: NaN"])
    text = device_report.as_text({"sections": {"part": section}, "is_dry_run": False})
    assert "FAILED part: b: NaN" in text


def test_a_long_table_keeps_what_failed_and_the_largest_of_all() -> None:
    tasks: dict[str, Any] = {f"task-{i}": {"status": "done", "error": i} for i in range(40)}
    tasks["task-20"]["status"] = "failed"
    section: Section = {"status": "failed", "seconds": 1.0, "failures": [], "tasks": tasks}
    text = device_report.as_text({"sections": {"part": section}, "is_dry_run": False})
    lines = [line.split() for line in text.splitlines()]
    assert ["task-20", "failed", "20"] in lines
    assert "task-21" not in text
    assert ["largest", "of", "40", "39"] in lines


def test_rates_are_shares_of_what_the_device_does_at_most() -> None:
    tasks = {
        "copy": {"bytes": 100, "seconds_per_call": 2.0},
        "decode": {"bytes": 10, "seconds_per_call": 1.0},
        "prefill": {"flops": 10, "seconds_per_call": 1.0},
    }
    report = device_report.with_rates({"sections": {"part": {"tasks": tasks}}})
    found = report["sections"]["part"]["tasks"]
    assert found["decode"]["bytes_per_s"] == 10
    assert found["decode"]["of_copy"] == 0.2
    assert "of_matmul" not in found["prefill"], "no product was measured"


def answer(*token_ids: int, gap: float = 1.0) -> Answer:
    return Answer(token_ids=list(token_ids), gaps=[gap] * len(token_ids))


def test_ids_may_differ_where_the_call_was_close_and_nowhere_else() -> None:
    assert compare([answer(1, 2, 3)], [answer(1, 2, 3)], 3) == (3, [])
    assert compare([answer(1, 9, 9)], [answer(1, 2, 3, gap=0.01)], 3) == (1, [])
    num_equal, (fault,) = compare([answer(1, 9, 9)], [answer(1, 2, 3)], 3)
    assert num_equal == 1
    assert "output 1: id 9, with the reference 2" in fault
    _, (fault,) = compare([answer(1)], [answer(1, 2, 3)], 3)
    assert "brought (1, 3) ids" in fault
    _, (fault,) = compare([answer(7)], [answer(8, gap=float("nan"))], 1)
    assert "output 0" in fault

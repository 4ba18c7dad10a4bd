"""The report of the device check: rates beside what the device was measured to do, and a summary.

Pure functions of the JSON object. Nothing here knows what a part does.
"""

import copy
from collections.abc import Mapping
from typing import Any

from ..server.table import format_table
from .device_records import Section

Report = dict[str, Any]
Task = dict[str, Any]
_SHOWN_TASKS = 12  # of each kind, in the summary
_NOT_SHOWN = ("status", "bytes", "flops", "calls", "num_failures")  # what rates are made from
_WIDEST = 60  # characters
_MAX_FAILURE = 300  # characters


def skipped(reason: str) -> Section:
    """The section of a part that did not begin."""
    return {"status": "skipped", "seconds": 0.0, "reason": reason, "failures": [], "tasks": {}}


def with_rates(report: Report) -> Report:
    """The report, in which every task that says what a call takes has rates too.

    of_copy and of_matmul are shares of the rates that the tasks named "copy" and "matmul" have.
    """
    report = copy.deepcopy(report)
    tasks = [task for section in report["sections"].values() for task in section["tasks"].items()]
    for _, task in tasks:
        for what in ("bytes", "flops"):
            if what in task and "seconds_per_call" in task:
                task[f"{what}_per_s"] = task[what] / task["seconds_per_call"]
    yardsticks = dict(tasks)
    for share, what, name in (
        ("of_copy", "bytes_per_s", "copy"),
        ("of_matmul", "flops_per_s", "matmul"),
    ):
        most = yardsticks.get(name, {}).get(what)
        for _, task in tasks:
            if most and what in task:
                task[share] = task[what] / most
    return report


def is_good(report: Report) -> bool:
    """Whether all of it ran, and nothing failed."""
    return all(section["status"] == "done" for section in report["sections"].values())


def as_text(report: Report) -> str:
    """A summary: what was found, part by part, and what is wrong at the end, where it is seen."""
    lines: list[str] = []
    failures: list[str] = []
    for name, section in report["sections"].items():
        counts = [
            f"{sum(task['status'] == status for task in section['tasks'].values())} {status}"
            for status in ("done", "failed", "skipped")
        ]
        where = f"{section.get('platform')} {section.get('device_kind')}"
        lines.append(
            f"\n{name}: {section['status']} in {section['seconds']:.1f} s on {where}; "
            f"tasks: {', '.join(counts)}"
        )
        if "reason" in section:
            lines.append(section["reason"])
        failures += [f"{name}: {failure}"[:_MAX_FAILURE] for failure in section["failures"]]
        lines += _tables(section)
    lines += ["", *(f"FAILED {failure}" for failure in failures)]
    states = [f"{name} {section['status']}" for name, section in report["sections"].items()]
    kind = "dry run, which says nothing about a device" if report["is_dry_run"] else "device check"
    lines.append(f"{kind}: {', '.join(states)}")
    return "\n".join(lines)


def _tables(section: Section) -> list[str]:
    """Plain values of the tasks: a table for each kind of task, known by what it found."""
    kinds: dict[tuple[str, ...], dict[str, Task]] = {}
    for name, task in section["tasks"].items():
        shown = {key: value for key, value in task.items() if _is_shown(key, value)}
        kinds.setdefault(tuple(shown), {})[name] = shown | {"status": task["status"]}
    return [_table(names, tasks) for names, tasks in kinds.items()]


def _table(names: tuple[str, ...], tasks: Mapping[str, Task]) -> str:
    """The first tasks, every one that is not done, and the largest value of each column."""
    rows = [
        (name, task["status"], *(_text(task[key]) for key in names))
        for at, (name, task) in enumerate(tasks.items())
        if at < _SHOWN_TASKS or task["status"] != "done"
    ]
    if len(rows) < len(tasks):
        columns = [[task[key] for task in tasks.values()] for key in names]
        largest = ["" if isinstance(column[0], str) else _text(max(column)) for column in columns]
        rows.append((f"largest of {len(tasks)}", "", *largest))
    return format_table(("task", "status", *names), rows)


def _is_shown(name: str, value: Any) -> bool:
    is_plain = isinstance(value, int | float | str) and len(_text(value)) < _WIDEST
    return is_plain and name not in _NOT_SHOWN


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""What the processes of a part recorded, and the section of the report that follows. No JAX."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Section = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """The records so far, without a last line that is not complete."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


@dataclass(frozen=True, kw_only=True)
class ShareRecords:
    """What became of one share of a part's tasks.

    Attributes:
      records: As device_worker writes them.
      deaths: How processes ended that did not end by themselves, in order.
    """

    records: Sequence[Record]
    deaths: Sequence[str] = field(default_factory=list)

    @property
    def tasks(self) -> list[str]:
        """Names of its tasks; none if no process came so far as to say."""
        return next((record["tasks"] for record in self.records if "tasks" in record), [])

    @property
    def begun(self) -> list[str]:
        """Tasks that were begun, in order."""
        return [record["began"] for record in self.records if "began" in record]

    @property
    def found(self) -> dict[str, Mapping[str, Any]]:
        """What each task found that came to its end."""
        return {record["task"]: record for record in self.records if "task" in record}


def section_of(
    shares: Sequence[ShareRecords], *, seconds: float, stopped_after_s: float | None
) -> Section:
    """One part of the report.

    Args:
      shares: Its shares.
      seconds: What it took, until now.
      stopped_after_s: When it was stopped. None: it was not.

    Returns:
      `status`: "done", "failed", or "skipped" where nothing failed and a task was not begun.
      `failures`: what is wrong. `tasks`: by name, each with a status, and what it found.
    """
    section: Section = {"status": "", "seconds": seconds}
    for name in ("platform", "device_kind", "jax"):
        known = [record[name] for share in shares for record in share.records if name in record]
        section[name] = known[0] if known else None
    tasks: dict[str, Section] = {}
    failures: list[str] = []
    for share in shares:
        deaths = list(share.deaths)
        for name in share.tasks:
            task = tasks[name] = _task_of(share, name, deaths, stopped_after_s)
            failures += [f"{name}: {failure}" for failure in task.get("failures", ())]
        failures += deaths  # of no task
        if not share.tasks and not deaths:
            failures.append("stopped before it said what its tasks are")
    is_whole = all(task["status"] != "skipped" for task in tasks.values())
    section["status"] = "failed" if failures else "done" if is_whole else "skipped"
    return section | {"failures": failures, "tasks": tasks}


def _task_of(
    share: ShareRecords, name: str, deaths: list[str], stopped_after_s: float | None
) -> Section:
    """One task; takes from the deaths, which are in the order of the tasks, what was its own."""
    if name in share.found:
        found = share.found[name]
        values = {key: value for key, value in found.items() if key != "task"}
        return {"status": "failed" if found.get("failures") else "done", **values}
    if name not in share.begun:
        return {"status": "skipped", "reason": "it was not begun: the part ended before"}
    is_last = share.begun[-1] == name
    if is_last and stopped_after_s is not None and not deaths:
        return {"status": "failed", "failures": [f"stopped {stopped_after_s:.1f} s into the part"]}
    return {"status": "failed", "failures": [deaths.pop(0) if deaths else "it is running"]}

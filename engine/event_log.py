"""EventLog: a file of all that was asked of the scheduler and all that it decided. No JAX.

One JSON object a line, "op" first:
  start   the configuration, so that a replay can begin; and a date, with the time that it was
  add     a request was queued
  mask    it became known which ids may come next in a guided output
  end     one ended between two steps: cancelled, failed
  step    deadlines were looked at and a step was made (or none): who expired, what it does, why
  read    what a step brought: token and status of each row, null where its request had gone
  note    anything else that was decided outside the scheduler: refused, paused, resumed
  full    the log has its largest size, and ends
  closed  the engine has ended, and the log with it; a killed one leaves neither
Times are those of the clock that the engine was given. The scheduler is a function of these inputs,
so `engine.replay` runs them again and must find the same decisions. The log holds token ids of
prompts and outputs: it is as private as they are. A cache salt is a secret that outlives its prompt
and lets whoever knows it share pages, so of a salt there is a digest: it parts and joins the same
prompts, which is all that a decision depends on.
"""

import dataclasses
import datetime
import json
import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..configs.engine_config import EngineConfig
from .request import FinishReason
from .schedule import RequestState, Schedule
from .step_costs import StepCosts
from .typed_hash import typed_hash

logger = logging.getLogger(__name__)

VERSION = 2


@runtime_checkable
class Recorder(Protocol):
    """What the engine tells of its scheduler. Called on the engine's thread."""

    has_ended: bool
    """Nothing more is kept: what is dear to tell need not be told."""

    def start(
        self, config: EngineConfig, num_pages: int, max_host_pages: int, costs: StepCosts
    ) -> None:
        """An engine begins."""

    def add(self, state: RequestState, at_s: float) -> None:
        """A request was queued."""

    def end(self, request_id: str, reason: FinishReason, at_s: float) -> None:
        """A request ended between two steps."""

    def mask(self, state: RequestState, at_s: float) -> None:
        """It became known which ids may come next in a guided output."""

    def step(
        self, at_s: float, expired: Sequence[RequestState], schedule: Schedule | None, *, made: bool
    ) -> None:
        """Deadlines were looked at; and a step was made, unless the engine is paused."""

    def read(self, at_s: float, measured_s: float, rows: Sequence[list[int] | None]) -> None:
        """The oldest unread step was read: (token, status) of each row, decode rows first."""

    def note(self, note: dict[str, Any]) -> None:
        """Something was decided elsewhere: "what", "at_s" and more."""

    def close(self) -> None:
        """Nothing follows."""


class EventLog:
    """Writes the log, up to a size.

    Attributes:
      has_ended: It is full, was closed, or could not be written.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        *,
        moment: tuple[float, datetime.datetime] | None = None,
    ) -> None:
        """Creates the file, which only its owner can read.

        Args:
          path: Must not exist: a log is never overwritten.
          max_bytes: When the log has this size it says so and ends; the engine goes on.
          moment: A time of the engine's clock and the date at it, with its zone, so that readers
            can tell the date of any time in the log.

        Raises:
          OSError: The file cannot be made.
        """
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
        self._room = max_bytes
        self._moment = moment
        self.has_ended = False
        self._last_decodes: list[int] = []

    def start(
        self, config: EngineConfig, num_pages: int, max_host_pages: int, costs: StepCosts
    ) -> None:
        """See Recorder."""
        base_s = [[key.rows, key.chunk, base_s] for key, base_s in costs.base_s.items()]
        moment: dict[str, Any] = {}
        if self._moment is not None:
            at_s, date = self._moment
            moment = {"at_s": at_s, "date": date.isoformat()}
        self._write(
            op="start",
            version=VERSION,
            **moment,
            config=dataclasses.asdict(config),
            num_pages=num_pages,
            max_host_pages=max_host_pages,
            costs=dataclasses.asdict(dataclasses.replace(costs, base_s={})) | {"base_s": base_s},
        )
        self._file.flush()

    def add(self, state: RequestState, at_s: float) -> None:
        """See Recorder."""
        if self.has_ended:
            return
        request = dataclasses.asdict(state.request)
        request["cache_salt"] = _digest_of(state.request.cache_salt)
        guide = state.request.sampling.guide
        if guide is not None:  # what it says is long, and decides nothing of the schedule
            request["sampling"]["guide"] = {"kind": guide.kind.value}
        leader = None if state.leader is None else state.leader.ordinal
        self._write(
            op="add", at_s=at_s, max_tokens=state.max_tokens, leader=leader, request=request
        )

    def mask(self, state: RequestState, at_s: float) -> None:
        """See Recorder."""
        self._write(op="mask", at_s=at_s, request_id=state.request.request_id)

    def end(self, request_id: str, reason: FinishReason, at_s: float) -> None:
        """See Recorder."""
        self._write(op="end", at_s=at_s, request_id=request_id, reason=reason.value)

    def step(
        self, at_s: float, expired: Sequence[RequestState], schedule: Schedule | None, *, made: bool
    ) -> None:
        """See Recorder. While the engine is paused, only what expired is worth a line."""
        if self.has_ended or not (expired or made):
            return
        plan = None if schedule is None else plan_of(schedule)
        if plan is not None:
            if plan["decodes"] == self._last_decodes:
                del plan["decodes"]  # most steps run the rows of the one before
            else:
                self._last_decodes = plan["decodes"]
        expired_ids = [state.request.request_id for state in expired]
        self._write(op="step", at_s=at_s, made=made, expired=expired_ids, plan=plan)

    def read(self, at_s: float, measured_s: float, rows: Sequence[list[int] | None]) -> None:
        """See Recorder."""
        self._write(op="read", at_s=at_s, measured_s=measured_s, rows=rows)

    def note(self, note: dict[str, Any]) -> None:
        """See Recorder."""
        self._write(op="note", **note)

    def close(self) -> None:
        """See Recorder."""
        if not self.has_ended:
            self.has_ended = True
            with self._tolerant():
                self._file.write('{"op":"closed"}\n')
        with self._tolerant():
            self._file.close()

    def _write(self, **record: Any) -> None:
        """Appends a line, or that the log is full; once it has ended, nothing."""
        if self.has_ended:
            return
        line = json.dumps(record, separators=(",", ":")) + "\n"
        self._room -= len(line)
        self.has_ended = self._room < 0
        with self._tolerant():
            self._file.write('{"op":"full"}\n' if self.has_ended else line)
            if self.has_ended:
                self._file.flush()

    @contextmanager
    def _tolerant(self) -> Generator[None]:
        """A log that cannot be written, the disk being full, ends; the engine goes on."""
        try:
            yield
        except OSError:
            logger.exception("the event log ends here")
            self.has_ended = True


def _digest_of(salt: str) -> str:
    """Stands for a salt. None, "", is itself, lest a prompt without look as if it had one."""
    return salt and typed_hash((b"salt", salt.encode("utf-8", "surrogatepass"))).hex()


def plan_of(schedule: Schedule) -> dict[str, Any]:
    """What a step does, in plain values: all that a replay must reproduce. Requests by ordinal."""
    return {
        "decodes": [state.ordinal for state in schedule.decodes],
        "chunks": [
            [chunk.state.ordinal, chunk.start, chunk.length, chunk.is_insert, chunk.is_last]
            for chunk in schedule.chunks
        ],
        "inserts": [state.ordinal for state in schedule.inserts],
        "page_entries": [list(entry) for entry in schedule.page_entries],
        "rule_entries": [list(entry) for entry in schedule.rule_entries],
        "transfers": [[each.kind.value, each.page, each.handle] for each in schedule.transfers],
        "events": [
            {"at_s": event.at_s, "kind": event.kind.value, "request_id": event.request_id}
            | event.detail
            for event in schedule.events
        ],
    }

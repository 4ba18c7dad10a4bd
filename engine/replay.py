"""Replay: runs the scheduler again from an event log and compares every decision. No JAX."""

import datetime
import enum
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..configs.engine_config import EngineConfig
from ..configs.scheduling_config import SchedulingConfig
from . import packing
from .event_log import VERSION, plan_of
from .request import FinishReason, Request
from .sampling_params import Guide, GuideKind, SamplingParams
from .schedule import RequestState, Schedule
from .scheduler import Scheduler
from .step_costs import StepCosts
from .step_shapes import StepKey


class ReplayError(ValueError):
    """The log cannot be replayed, or the replay decides otherwise; the message names the line."""


class LogEnd(enum.Enum):
    """How a log ends: the op of its last record, if that is one of an end."""

    CLOSED = "closed"  # with the engine
    FULL = "full"  # at its largest size
    OPEN = "open"  # after any record: its engine runs, was killed, or could not write
    TORN = "torn"  # likewise, in the middle of a line


@dataclass(kw_only=True)
class Replay:
    """What a replay found.

    Attributes:
      num_requests: Requests that were queued.
      num_steps: Steps that were made again, each with the same plan.
      num_events: Decisions that were found again.
      end: How the log ends; all before was replayed.
      story: What concerns the request that was asked about, oldest first: from "queued" to "ended".
    """

    num_requests: int = 0
    num_steps: int = 0
    num_events: int = 0
    end: LogEnd = LogEnd.OPEN
    story: list[dict[str, Any]] = field(default_factory=list)


def replay(lines: Iterable[str], *, request_id: str | None = None) -> Replay:
    """Runs a log again; checks the scheduler's invariants after every line.

    Args:
      lines: Of the log.
      request_id: Collects the story of this request.

    Raises:
      ReplayError: A line cannot be read, or says otherwise than the scheduler does.
      AssertionError: An invariant is broken.
    """
    records = _records(lines)
    number, start = next(records, (1, None))
    if start is None or start.get("op") != "start" or start.get("version") != VERSION:
        raise ReplayError(f"line 1: not the start of an event log of version {VERSION}")
    moment = _moment(start)
    player = _Player(_scheduler(start), request_id)
    found = player.found
    for number, record in records:
        if record["op"] in _ENDS:
            found.end = LogEnd(record["op"])
            break
        if record["op"] != "note":
            try:
                player.play(record)
            except ReplayError as error:
                raise ReplayError(f"line {number}: {error}") from error
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise ReplayError(f"line {number}: cannot be replayed: {error!r}") from error
            player.scheduler.check()
        if request_id is not None:
            found.story += _about(record, request_id)
    if moment is not None:
        found.story = [_dated(event, *moment) for event in found.story]
    return found


_ENDS = {LogEnd.CLOSED.value, LogEnd.FULL.value, LogEnd.TORN.value}


class _Player:
    """A scheduler that is told again what it was told.

    It tells of the one request what no record says: when its first token came, and how it ended.
    """

    def __init__(self, scheduler: Scheduler, request_id: str | None) -> None:
        self.scheduler = scheduler
        self.found = Replay()
        self._request_id = request_id
        self._unread: deque[Schedule] = deque()
        self._last_decodes: list[int] = []
        self._leaders: dict[int, RequestState] = {}  # of requests with several choices

    def play(self, record: dict[str, Any]) -> None:
        at_s = record["at_s"]
        match record["op"]:
            case "add":
                state = _state(record, self._leaders.get(record["leader"]))
                self.scheduler.add(state)
                if state.request.sampling.n > 1 and state.leader is None:
                    self._leaders[state.ordinal] = state
                self.found.num_requests += 1
            case "mask":
                self.scheduler.take_mask(self.scheduler.live[record["request_id"]])
            case "end":
                state = self.scheduler.live[record["request_id"]]
                self._end(state, FinishReason(record["reason"]), at_s)
            case "step":
                self._step(record, at_s)
            case "read":
                self.scheduler.observe(self._unread[0], record["measured_s"])
                self._read(record["rows"], at_s)
            case unknown:
                raise ReplayError(f"op is {unknown!r}, which is unknown")

    def _step(self, record: dict[str, Any], at_s: float) -> None:
        expired = self.scheduler.expired(at_s)
        _compare("expired", record["expired"], [state.request.request_id for state in expired])
        for state in expired:
            self._end(state, FinishReason.DEADLINE, at_s)
        if not record["made"]:
            return
        schedule = self.scheduler.schedule(at_s)
        if schedule is None:
            _compare("plan", record["plan"], None)
            return
        plan = json.loads(json.dumps(plan_of(schedule)))
        logged = {"decodes": self._last_decodes} | (record["plan"] or {})
        self._last_decodes = plan["decodes"]
        for part, value in plan.items():
            _compare(part, logged.get(part), value)
        self._unread.append(schedule)
        self.found.num_steps += 1
        self.found.num_events += len(schedule.events)

    def _read(self, rows: list[list[int] | None], at_s: float) -> None:
        schedule = self._unread.popleft()
        parts = [(state, None) for state in schedule.decodes]
        parts += [(chunk.state, chunk) for chunk in schedule.chunks]
        for (state, chunk), row in zip(parts, rows, strict=True):
            if row is None:
                continue
            token_id, status = row
            is_sample = chunk is None or chunk.is_last
            is_broken = bool(status & packing.BROKEN)
            if is_broken or (is_sample and not status & packing.VALID):
                self._end(state, FinishReason.ERROR, at_s, is_broken=is_broken)
                continue
            if chunk is None:
                self.scheduler.take_token(state, token_id)
            else:
                self.scheduler.take_chunk(chunk, token_id if is_sample else None)
            if is_sample and len(state.output_token_ids) == 1:
                self._tell(state, "first_token", at_s)
            if is_sample and status & packing.STOPPED:  # in the last place it is still a stop
                self._end(state, FinishReason.STOP, at_s)
            elif is_sample and status & packing.EXHAUSTED:
                self._end(state, FinishReason.LENGTH, at_s)

    def _end(
        self, state: RequestState, reason: FinishReason, at_s: float, *, is_broken: bool = False
    ) -> None:
        self.scheduler.remove(state, at_s, is_broken=is_broken)
        num_tokens = len(state.output_token_ids)
        self._tell(state, "ended", at_s, reason=reason.value, output_tokens=num_tokens)

    def _tell(self, state: RequestState, kind: str, at_s: float, **detail: int | str) -> None:
        if state.request.request_id == self._request_id:
            self.found.story.append({"at_s": at_s, "kind": kind} | detail)


def _records(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            yield number, {"op": LogEnd.TORN.value}
            return
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ReplayError(f"line {number}: not JSON: {error}") from error
        if not isinstance(record, dict) or "op" not in record:
            raise ReplayError(f"line {number}: it must be an object with an op")
        yield number, record


def _moment(start: dict[str, Any]) -> tuple[float, datetime.datetime] | None:
    """A time of the log's clock and the date at it, if the log has one."""
    if "date" not in start:
        return None
    try:
        return float(start["at_s"]), datetime.datetime.fromisoformat(start["date"])
    except (KeyError, TypeError, ValueError) as error:
        raise ReplayError(f"line 1: the start cannot be read: {error!r}") from error


def _scheduler(start: dict[str, Any]) -> Scheduler:
    try:
        fields = dict(start["config"])
        scheduling = dict(fields.pop("scheduling"))
        scheduling["tenant_weights"] = tuple(
            (tenant, weight) for tenant, weight in scheduling["tenant_weights"]
        )
        config = EngineConfig(**fields, scheduling=SchedulingConfig(**scheduling))
        costs = dict(start["costs"])
        base_s = {StepKey(rows, chunk): base_s for rows, chunk, base_s in costs.pop("base_s")}
        return Scheduler(
            config,
            start["num_pages"],
            StepCosts(base_s=base_s, **costs),
            max_host_pages=start["max_host_pages"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ReplayError(f"line 1: the start cannot be read: {error!r}") from error


def _state(record: dict[str, Any], leader: RequestState | None) -> RequestState:
    fields = dict(record["request"])
    sampling = dict(fields.pop("sampling"))
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        sampling[name] = None if sampling[name] is None else tuple(sampling[name])
    sampling["logit_bias"] = tuple((token_id, bias) for token_id, bias in sampling["logit_bias"])
    if sampling["guide"] is not None:
        sampling["guide"] = Guide(kind=GuideKind(sampling["guide"]["kind"]))
    fields["prompt_token_ids"] = tuple(fields["prompt_token_ids"])
    request = Request(**fields, sampling=SamplingParams(**sampling))
    return RequestState(
        request=request, max_tokens=record["max_tokens"], stop_ids=(), leader=leader
    )


def _compare(what: str, logged: Any, found: Any) -> None:
    if logged != found:
        raise ReplayError(f"{what} is {found} in the replay; the log has {logged}")


def _about(record: dict[str, Any], request_id: str) -> list[dict[str, Any]]:
    """What a record says of one request, without the token ids and what stands for its salt.

    How it ended is not here: the player tells, whichever way it was.
    """
    op = record["op"]
    if op == "add" and record["request"]["request_id"] == request_id:
        request = dict(record["request"])
        num_tokens = len(request.pop("prompt_token_ids"))
        request.pop("cache_salt", None)
        return [{"at_s": record["at_s"], "kind": "queued", "prompt_tokens": num_tokens} | request]
    if op == "note" and record.get("request_id") == request_id:
        said = {name: value for name, value in record.items() if name not in ("op", "what")}
        return [{"at_s": record["at_s"], "kind": record["what"]} | said]
    if op == "step":
        plan = record["plan"] or {"events": []}
        return [event for event in plan["events"] if event["request_id"] == request_id]
    return []


def _dated(event: dict[str, Any], at_s: float, date: datetime.datetime) -> dict[str, Any]:
    """The event with the date that belongs to its time; at at_s it was `date`."""
    then = date + datetime.timedelta(seconds=event["at_s"] - at_s)
    return {"at_s": event["at_s"], "date": then.isoformat(timespec="milliseconds")} | event

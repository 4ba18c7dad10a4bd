"""An event log reproduces a run: every plan, every event, every page; and shows any difference."""

import datetime
import errno
import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, override

import pytest

from octavo.configs.scheduling_config import PolicyName
from octavo.engine import engine as engine_module
from octavo.engine import event_log
from octavo.engine.engine import Engine
from octavo.engine.event_log import EventLog
from octavo.engine.replay import LogEnd, ReplayError, replay
from octavo.engine.request import FinishReason, RequestOutput

from .engine_machine import OPTIONS
from .fake_model import VOCAB_SIZE
from .fakes import Clock, add_request, fake_engine, finish, request, small_config

POLICIES: tuple[PolicyName, ...] = ("fcfs", "priority", "fair", "deadline")


def _random_run(
    path: Path,
    seed: int,
    policy: PolicyName,
    max_bytes: int = 1 << 30,
    take: Callable[[list[RequestOutput]], None] = lambda step: None,
    *,
    deterministic: bool = False,
) -> Engine:
    """Everything that a scheduler can be told: arrivals, aborts, deadlines, pauses, few pages."""
    rng = random.Random(seed)
    page_size = rng.randint(2, 4)
    config = small_config(
        policy=policy,
        queue_ttl_s=20.0,
        max_tenant_running=3,
        inter_token_target_ms=None if deterministic else 1.15,
        deterministic=deterministic,
        prefill_chunk_tokens=2 * page_size if deterministic else 8,
        tenant_weights=(("b", 2.0),),
        page_size=page_size,
    )
    clock = Clock()
    log = EventLog(path, max_bytes)
    engine, _ = fake_engine(
        config,
        num_pages=rng.randint(15, 30),
        clock=clock,
        max_host_pages=100 if deterministic else 4,
        recorder=log,
    )
    for number in range(120):
        clock.now_s += rng.random()
        if rng.random() < 0.5:
            prompt = [*range(rng.randint(0, 9)), *rng.choices(range(VOCAB_SIZE), k=5)]
            one = request(
                f"r{number}",
                prompt,
                arrival_s=clock.now_s,
                max_tokens=rng.randint(3, 12),
                deadline_s=clock.now_s + rng.randint(1, 30) if rng.random() < 0.3 else None,
                tenant=rng.choice("abc"),
                priority=rng.randint(0, 3),
                cache_salt=rng.choice(["", "", "salt", "pepper"]),
                ttft_target_s=rng.choice([None, 0.5, 3.0]),
                tpot_target_s=rng.choice([None, 0.001, 0.0012]),
                prompt_logprobs=rng.random() < 0.1,
                seed=rng.randint(0, 5),
                temperature=1.0,
                **({"ignore_eos": False} | rng.choice(OPTIONS)),
            )
            add_request(engine, one)
        live = list(engine._scheduler.live)
        if live and rng.random() < 0.1:
            engine.abort(rng.choice(live))
        if rng.random() < 0.05:
            take(engine.collect())
        else:
            take(engine.step())
    while engine.has_work:
        clock.now_s += 0.1
        take(engine.step())
    assert engine.failure is None
    log.close()
    return engine


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_a_log_reproduces_the_schedule(tmp_path: Path, policy: PolicyName, seed: int) -> None:
    """Fails if a decision depends on anything but what the log holds. Kind 5.6."""
    path = tmp_path / "log"
    engine = _random_run(path, seed, policy)
    found = replay(_lines(path))
    load = engine.load()
    assert found.num_steps == load.steps_total
    # Choices that ended before the first one's prompt was computed were never queued.
    assert found.num_requests == engine._scheduler._num_added <= sum(load.finished_total.values())
    assert found.end is LogEnd.CLOSED
    assert found.num_events > found.num_requests / 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_log_of_a_deterministic_engine_does_too(tmp_path: Path, policy: PolicyName) -> None:
    """Who was swapped out, came back and went on with which row is in the plans."""
    path = tmp_path / "log"
    engine = _random_run(path, 1, policy, deterministic=True)
    assert replay(_lines(path)).num_steps == engine.load().steps_total
    assert engine.load().preemptions_total > 0
    plans = [json.loads(line).get("plan") for line in _lines(path)]
    assert any(plan["inserts"] for plan in plans if plan)
    # Who comes back has nothing from the cache, and missed nothing there.
    events = [event for plan in plans if plan for event in plan["events"]]
    admitted = [event for event in events if event["kind"] == "admitted"]
    cached = sum(event["cached_tokens"] for event in admitted)
    assert cached == engine.load().cached_tokens_total > 0
    first = {event["request_id"]: event for event in reversed(admitted)}
    assert all(("miss" in each) == (first[each["request_id"]] is each) for each in admitted)
    assert len(first) < len(admitted)


def test_the_runs_did_what_they_are_for(tmp_path: Path) -> None:
    """Preemptions, copies to the host and back, hits, deadlines: else a replay proves little."""
    loads = [_random_run(tmp_path / p, 1, p).load() for p in POLICIES]
    assert sum(load.preemptions_total for load in loads) > 5
    assert sum(load.imported_pages_total for load in loads) > 5
    assert sum(load.cached_tokens_total for load in loads) > 50
    assert sum(load.finished_total[FinishReason.DEADLINE] for load in loads) > 5


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def _tamper(path: Path, change: Any) -> None:
    """Changes the first record that `change` accepts."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(None for record in lines if change(record))
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))


def _other_page(record: dict[str, Any]) -> bool:
    if not (record["op"] == "step" and record["plan"] and record["plan"]["page_entries"]):
        return False
    record["plan"]["page_entries"][0][2] += 1
    return True


def _other_reason(record: dict[str, Any]) -> bool:
    for event in (record.get("plan") or {"events": []})["events"]:
        if event["kind"] == "admitted":
            event["miss"] = "because"
            return True
    return False


def _other_token(record: dict[str, Any]) -> bool:
    """A token decides what is published: a later hit comes out different."""
    if record["op"] == "add" and len(record["request"]["prompt_token_ids"]) > 8:
        record["request"]["prompt_token_ids"][0] = 39
        return True
    return False


def _unknown(record: dict[str, Any]) -> bool:
    record["op"] = "dance" if (is_add := record["op"] == "add") else record["op"]
    return is_add


@pytest.mark.parametrize("change", [_other_page, _other_reason, _other_token, _unknown])
def test_a_difference_is_found_and_its_line_is_named(tmp_path: Path, change: Any) -> None:
    """The check itself: a replay that compares nothing would pass all above."""
    path = tmp_path / "log"
    _random_run(path, 2, "fcfs")
    _tamper(path, change)
    with pytest.raises(ReplayError, match=r"^line \d+: "):
        replay(_lines(path))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}\n", "[]\n", "x\n", '{"op":"start","version":9}\n'),
        '{"op":"start","version":1,"at_s":1,"date":"x"}\n',
    ],
)
def test_what_is_no_log_is_refused(text: str) -> None:
    with pytest.raises(ReplayError, match=r"^line 1: "):
        replay(text.splitlines(keepends=True))


def test_a_log_ends_at_its_largest_size_and_can_be_replayed_so_far(tmp_path: Path) -> None:
    path = tmp_path / "log"
    _random_run(path, 3, "fair", max_bytes=20_000)
    assert path.stat().st_size < 20_000 + len('{"op":"full"}\n') + 1
    found = replay(_lines(path))
    assert found.end is LogEnd.FULL
    assert found.num_steps > 10


def test_a_log_that_is_full_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if lines are made first: a full log was as dear as a running one, for ever."""
    made: list[str] = []

    def count(module: ModuleType, name: str) -> None:
        real = getattr(module, name)

        def counted(*args: Any, **options: Any) -> Any:
            made.append(name)
            return real(*args, **options)

        monkeypatch.setattr(module, name, counted)

    count(event_log, "plan_of")
    count(engine_module, "rows_of_record")
    count(json, "dumps")
    log = EventLog(tmp_path / "log", 3_000)
    engine, _ = fake_engine(recorder=log)
    add_request(engine, request("a", range(10), max_tokens=40))
    while not log.has_ended:
        engine.step()
    assert set(made) == {"plan_of", "rows_of_record", "dumps"}
    made.clear()
    add_request(engine, request("b", range(10), max_tokens=3))
    add_request(engine, request("c", range(10), max_tokens=3))
    engine.abort("c")
    engine.note({"what": "paused"})
    finish(engine)
    assert not made
    log.close()


def test_a_log_that_its_last_line_fills_ends_with_the_next(tmp_path: Path) -> None:
    """Breaks if it ends without a word: a replay would take it for complete."""
    note = json.dumps({"op": "note", "n": 1}, separators=(",", ":")) + "\n"
    log = EventLog(tmp_path / "log", len(note))
    for _ in range(3):
        log.note({"n": 1})
    log.close()
    assert (tmp_path / "log").read_text() == note + '{"op":"full"}\n'


def test_the_last_line_of_a_killed_process_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "log"
    _random_run(path, 3, "fcfs")
    *lines, last, closed = _lines(path)
    assert closed == '{"op":"closed"}\n'
    whole = replay([*lines, last, closed])
    torn = replay([*lines, last[:-9]])
    assert (torn.end, torn.num_steps) == (LogEnd.TORN, whole.num_steps)
    assert replay([*lines, last]).end is LogEnd.OPEN
    assert replay(lines[:200]).end is LogEnd.OPEN


def test_nobody_else_reads_a_log_and_none_is_overwritten(tmp_path: Path) -> None:
    """It holds the prompts."""
    path = tmp_path / "log"
    EventLog(path, 100).close()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        EventLog(path, 100)


def test_the_story_of_one_request(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = EventLog(path, 1 << 20)
    engine, _ = fake_engine(recorder=log)
    for name in ("first", "second"):
        add_request(engine, request(name, range(10), max_tokens=3, tenant="t"))
        while engine.has_work:
            engine.step()
    log.close()
    queued, admitted, first_token, ended = replay(_lines(path), request_id="second").story
    assert (queued["kind"], queued["prompt_tokens"], queued["tenant"]) == ("queued", 10, "t")
    assert (admitted["kind"], admitted["cached_tokens"]) == ("admitted", 8)
    assert (admitted["miss"], admitted["miss_at_token"]) == ("page_border", 8)
    assert first_token["kind"] == "first_token"
    assert (ended["kind"], ended["reason"], ended["output_tokens"]) == ("ended", "length", 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_story_tells_the_end_that_the_engine_told(tmp_path: Path, policy: PolicyName) -> None:
    """Fails if a story stops before its end, or tells another: stopped, aborted, expired."""
    path = tmp_path / "log"
    outputs: dict[str, int] = Counter()
    reasons: dict[str, str] = {}

    def take(step: list[RequestOutput]) -> None:
        for output in step:
            if output.choice:
                continue  # each choice has a story of its own
            outputs[output.request_id] += len(output.token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason.value

    _random_run(path, 1, policy, take=take)
    lines = _lines(path)
    assert {"length", "cancelled", "deadline"} <= set(reasons.values())
    some = {reason: request_id for request_id, reason in reasons.items()}  # each replay is a run
    for reason, request_id in some.items():
        story = replay(lines, request_id=request_id).story
        assert story[0]["kind"] == "queued"
        *_, ended = (event for event in story if event["kind"] == "ended")
        assert ended is story[-1]
        assert (ended["reason"], ended["output_tokens"]) == (reason, outputs[request_id])
        num_first = sum(event["kind"] == "first_token" for event in story)
        assert num_first == (outputs[request_id] > 0)
        assert [event["at_s"] for event in story] == sorted(event["at_s"] for event in story)


def test_a_story_has_dates(tmp_path: Path) -> None:
    path = tmp_path / "log"
    date = datetime.datetime(2026, 11, 30, 23, 59, 59, tzinfo=datetime.UTC)
    log = EventLog(path, 1 << 20, moment=(5.0, date))
    clock = Clock()
    clock.now_s = 7.25
    engine, _ = fake_engine(recorder=log, clock=clock)
    add_request(engine, request("a", range(10), max_tokens=3))
    finish(engine)
    log.close()
    start = json.loads(_lines(path)[0])
    assert (start["at_s"], start["date"]) == (5.0, "2026-11-30T23:59:59+00:00")
    queued, *_ = replay(_lines(path), request_id="a").story
    assert (queued["at_s"], queued["date"]) == (7.25, "2026-12-01T00:00:01.250+00:00")


def test_a_salt_is_in_neither_log_nor_story_and_still_parts_and_joins(tmp_path: Path) -> None:
    """Whoever knows a salt can share its pages. Breaks if salts are left out: all would share."""
    path = tmp_path / "log"
    log = EventLog(path, 1 << 20)
    engine, _ = fake_engine(recorder=log)
    salts = ["cumin", "clove", "", "cumin", "clove", ""]
    for number, salt in enumerate(salts):
        add_request(engine, request(f"r{number}", range(10), max_tokens=3, cache_salt=salt))
        while engine.has_work:
            engine.step()
    log.close()
    stories = [replay(_lines(path), request_id=f"r{number}").story for number in range(6)]
    assert [admitted["cached_tokens"] for _, admitted, *_ in stories] == [0, 0, 0, 8, 8, 8]
    assert "cumin" not in path.read_text()
    assert "clove" not in path.read_text()
    added = [json.loads(line)["request"] for line in _lines(path) if '"op":"add"' in line]
    logged = [one["cache_salt"] for one in added]
    assert logged[:3] == logged[3:]
    assert len(set(logged)) == 3
    assert logged[2] == ""
    assert not any("cache_salt" in part for story in stories for part in story)


@pytest.mark.parametrize("choice", [None, 0, 2])
@pytest.mark.parametrize("num_steps", range(5))
def test_choices_may_end_at_any_time(tmp_path: Path, choice: int | None, num_steps: int) -> None:
    """Fails if the log holds the end of a choice that was never queued: no replay knows it."""
    path = tmp_path / "log"
    engine, _ = fake_engine(recorder=EventLog(path, 1 << 20))
    add_request(engine, request("a", range(20), n=3, max_tokens=4))
    for _ in range(num_steps):
        engine.step()
    assert engine.abort("a", choice=choice)
    finish(engine)
    engine.close()
    assert replay(_lines(path)).num_steps == engine.load().steps_total


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_forks_come_after_all_that_a_step_brought(
    tmp_path: Path, policy: PolicyName, max_tokens: int
) -> None:
    """Fails under fair if they are queued before their leader ends: its tenant never leaves then,
    but in a replay it does."""
    path = tmp_path / "log"
    config = small_config(policy=policy, max_num_seqs=2)
    engine, _ = fake_engine(config, recorder=EventLog(path, 1 << 20))
    add_request(engine, request("long", range(1, 33), tenant="b", max_tokens=30))
    add_request(engine, request("forked", (1, 2, 3), tenant="a", n=3, max_tokens=max_tokens))
    for number in range(4):
        one = request(f"short {number}", (9, number + 1), tenant="b", max_tokens=5)
        add_request(engine, one)
    finish(engine)
    engine.close()
    assert replay(_lines(path)).num_steps == engine.load().steps_total


class _FullDisk(io.StringIO):
    @override
    def write(self, text: str, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_log_and_not_the_engine(tmp_path: Path) -> None:
    """Fails if an error of the log reaches the engine thread, which would hang every request."""
    log = EventLog(tmp_path / "log", 1 << 30)
    log._file.close()
    log._file = _FullDisk()
    engine, _ = fake_engine(recorder=log)
    add_request(engine, request("a", range(10), max_tokens=3))
    answers = finish(engine)
    assert len(answers["a"].token_ids) == 3
    log.close()


def test_a_record_that_comes_twice_is_an_error_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    _random_run(path, 2, "fcfs")
    lines = _lines(path)
    added = next(line for line in lines if '"op":"add"' in line)
    at = lines.index(added)
    with pytest.raises(ReplayError, match=rf"^line {at + 2}: cannot be replayed: ValueError"):
        replay([*lines[: at + 1], added, *lines[at + 1 :]])

"""The thread and those around it. A gate in `fetch` stops the device where a test needs it."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import override

import numpy as np
import pytest

from octavo.engine import engine_thread
from octavo.engine.engine import Engine
from octavo.engine.engine_thread import EngineThread
from octavo.engine.refusals import EngineUnavailable, InvalidRequest, Overloaded
from octavo.engine.request import FinishReason, Request, RequestOutput

from .fakes import (
    Answer,
    Clock,
    FakeExecutor,
    collect,
    limits_for,
    planned_costs,
    request,
    run_alone,
    small_config,
)

WAIT_S = 20.0  # far beyond what any of these takes


class GatedExecutor(FakeExecutor):
    """`fetch` waits until `gate` is set; `is_fetching` says that the engine thread is in there."""

    gate: threading.Event
    is_fetching: threading.Event

    @override
    def fetch(self, result: tuple[int, np.ndarray]) -> np.ndarray:
        self.is_fetching.set()
        assert self.gate.wait(WAIT_S)
        return super().fetch(result)


class Rig:
    """An engine thread, what it handed over, and ways to wait for it."""

    def __init__(self, **config: object) -> None:
        self.config = small_config(**config)
        self.limits = limits_for(self.config, num_pages=65)
        self.clock = Clock()
        self.executor = GatedExecutor(self.config, self.limits)
        self.executor.gate, self.executor.is_fetching = threading.Event(), threading.Event()
        self.executor.gate.set()
        costs = planned_costs(self.config)
        self.engine = Engine(self.config, self.limits, self.executor, self.clock, costs)
        self.thread = EngineThread(self.engine, self._on_outputs, self.clock)
        self.calls: list[list[RequestOutput]] = []
        self.on_call: Callable[[], None] = lambda: None
        self._arrived = threading.Condition()

    def _on_outputs(self, outputs: list[RequestOutput]) -> None:
        self.on_call()
        with self._arrived:
            self.calls.append(outputs)
            self._arrived.notify_all()

    def answers(self) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        with self._arrived:
            for outputs in self.calls:
                collect(outputs, answers)
        return answers

    def wait_for(self, *request_ids: str) -> dict[str, Answer]:
        """Waits until these have ended."""

        def have_ended() -> bool:
            outputs = [output for outputs in self.calls for output in outputs]
            return set(request_ids) <= {o.request_id for o in outputs if o.finish_reason}

        self.wait_until(have_ended)
        return self.answers()

    def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Looks again after every call of on_outputs."""
        with self._arrived:
            assert self._arrived.wait_for(is_met, WAIT_S)

    def wait_until_idle(self) -> None:
        """Until the thread has nothing to do but to sleep."""
        give_up_s = time.monotonic() + WAIT_S
        while self.engine.has_work:
            assert time.monotonic() < give_up_s
            time.sleep(0.001)

    def expected(self, wanted: Request) -> Answer:
        return run_alone(wanted, self.config, self.limits)

    def close_gate(self) -> None:
        """Stops the engine thread in its next fetch, and waits until it is there."""
        self.executor.gate.clear()
        self.executor.is_fetching.clear()

    def wait_until_fetching(self) -> None:
        assert self.executor.is_fetching.wait(WAIT_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.thread.start()
    yield rig
    rig.executor.gate.set()
    rig.thread.stop()
    assert rig.thread.join(WAIT_S)


def test_requests_of_many_threads_get_their_own_tokens(rig: Rig):
    wanted = [request(f"r{n}", range(n % 11 + 1), max_tokens=n % 7 + 1) for n in range(48)]

    def submit(part: list[Request]) -> None:
        for one in part:
            rig.thread.submit(one)

    callers = [threading.Thread(target=submit, args=(wanted[at::6],)) for at in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    answers = rig.wait_for(*(one.request_id for one in wanted))
    assert answers == {one.request_id: rig.expected(one) for one in wanted}
    assert len(rig.calls) <= len(rig.executor.keys), "more than one call per step"


def test_refuses_in_the_callers_thread(rig: Rig):
    with pytest.raises(InvalidRequest, match="prompt_token_ids is 0"):
        rig.thread.submit(request("a", ()))
    rig.thread.submit(request("a", max_tokens=1))  # the id was not taken
    rig.wait_for("a")


def test_one_of_many_simultaneous_requests_with_one_id_is_taken():
    """Fails if the id is looked up and entered in two steps."""
    rig = Rig(max_num_queued=100)
    taken = _race(rig, ["same"] * 16, InvalidRequest)
    assert taken == 1


def test_no_more_are_taken_than_slots_and_queue_hold():
    rig = Rig(max_num_seqs=4, max_num_queued=3)
    taken = _race(rig, [f"r{n}" for n in range(16)], Overloaded)
    assert taken == 7
    assert rig.thread.load().num_queued == 7


def _race(rig: Rig, request_ids: list[str], refusal: type[Exception]) -> int:
    """Submits all at once from as many threads, with nothing running; how many were taken."""
    barrier = threading.Barrier(len(request_ids))
    taken: list[str] = []

    def submit(request_id: str) -> None:
        barrier.wait(WAIT_S)
        try:
            rig.thread.submit(request(request_id, max_tokens=1))
            taken.append(request_id)
        except refusal:
            pass

    callers = [threading.Thread(target=submit, args=(name,)) for name in request_ids]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return len(taken)


@pytest.mark.parametrize("num_others", [0, 9], ids=["running", "queued"])
@pytest.mark.parametrize("num_prompt", [3, 60], ids=["decode", "prefill"])
def test_an_abort_takes_effect_before_the_next_step(rig: Rig, num_prompt: int, num_others: int):
    """The device is busy when the abort comes; no step after it contains the request."""
    rig.close_gate()
    for number in range(num_others):
        rig.thread.submit(request(f"other{number}", [1] * num_prompt, max_tokens=3))
    rig.thread.submit(request("a", [1] * num_prompt, max_tokens=30))
    rig.wait_until_fetching()
    rig.thread.abort("a", FinishReason.CANCELLED)
    num_dispatched = len(rig.executor.keys)
    rig.executor.gate.set()
    answers = rig.wait_for("a")
    assert answers["a"].finish_reason is FinishReason.CANCELLED
    assert len(answers["a"].token_ids) <= 1, "only the step that was being read can bring one"
    if num_others == 0:
        rig.wait_until_idle()
        assert len(rig.executor.keys) == num_dispatched
        assert rig.thread.load().num_free_pages == 64


def test_an_abort_of_what_is_not_live_does_nothing(rig: Rig):
    rig.thread.abort("nobody")
    rig.thread.submit(request("a", max_tokens=2))
    rig.wait_for("a")
    rig.thread.abort("a")
    rig.thread.submit(request("b", max_tokens=2))
    assert set(rig.wait_for("b")) == {"a", "b"}


def test_an_abort_right_after_submit_ends_the_request():
    """Both are in the inbox together; in the wrong order the abort would be lost."""
    rig = Rig()
    rig.thread.submit(request("a", max_tokens=20))
    rig.thread.abort("a")
    rig.thread.start()
    assert rig.wait_for("a")["a"].finish_reason is FinishReason.CANCELLED
    assert rig.executor.keys == []
    rig.thread.stop()
    assert rig.thread.join(WAIT_S)


def test_a_deadline_passes_while_a_request_waits(rig: Rig):
    rig.close_gate()
    for number in range(4):
        rig.thread.submit(request(f"running{number}", max_tokens=50))
    rig.thread.submit(request("waiting", max_tokens=50, deadline_s=5.0))
    rig.wait_until_fetching()
    rig.clock.now_s = 5.0
    rig.executor.gate.set()
    answers = rig.wait_for("waiting")
    assert answers["waiting"] == Answer(finish_reason=FinishReason.DEADLINE)


def test_the_thread_sleeps_while_nothing_is_live(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Fails if the loop polls: steps would be taken between two requests."""
    rig.thread.submit(request("a", max_tokens=2))
    rig.wait_for("a")
    rig.wait_until_idle()
    steps: list[int] = []
    monkeypatch.setattr(rig.engine, "step", lambda: steps.append(1) or [])
    threading.Event().wait(0.05)
    assert not steps


def test_an_id_is_free_again_when_its_last_output_arrives(rig: Rig):
    """The receiver submits the same id from within the call that ends it."""

    def submit_again() -> None:
        rig.on_call = lambda: None
        rig.thread.submit(request("a", max_tokens=1))

    rig.on_call = submit_again
    rig.thread.submit(request("a", max_tokens=1))
    rig.wait_until(lambda: len(rig.calls) == 2)
    assert [output.request_id for outputs in rig.calls for output in outputs] == ["a", "a"]
    assert not rig.thread.load().failed, "the submit raised"


def test_stop_ends_every_request_and_the_thread(rig: Rig):
    rig.close_gate()
    for number in range(9):
        rig.thread.submit(request(f"r{number}", max_tokens=50))
    rig.wait_until_fetching()
    rig.thread.stop()
    with pytest.raises(EngineUnavailable):
        rig.thread.submit(request("late"))
    rig.executor.gate.set()
    assert rig.thread.join(WAIT_S)
    answers = rig.answers()
    assert len(answers) == 9
    assert all(answer.finish_reason is FinishReason.ERROR for answer in answers.values())


def test_paused_no_step_begins_and_the_one_in_flight_is_handed_over(rig: Rig):
    wanted = request("a", range(3), max_tokens=9)
    rig.close_gate()
    rig.thread.submit(wanted)
    rig.wait_until_fetching()
    rig.thread.pause()
    assert rig.thread.load().is_paused
    num_dispatched = len(rig.executor.keys)
    rig.executor.gate.set()
    # It was reading one step with the next in flight: two tokens.
    rig.wait_until(lambda: sum(len(output.token_ids) for [output] in rig.calls) == 2)
    rig.thread.submit(request("b", max_tokens=2))
    threading.Event().wait(0.3)
    assert len(rig.executor.keys) == num_dispatched
    assert len(rig.calls) == 2
    assert rig.thread.load().num_queued == 1
    rig.thread.pause()  # twice is no error
    rig.thread.resume()
    assert not rig.thread.load().is_paused
    answers = rig.wait_for("a", "b")
    assert answers["a"] == rig.expected(wanted), "a token was lost or came twice"
    rig.thread.resume()


def test_what_is_in_flight_when_a_pause_begins_is_read_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    """Breaks if the thread sleeps first: the step would be measured as one that took so long."""
    monkeypatch.setattr(engine_thread, "PAUSED_WAKE_S", 10 * WAIT_S)
    rig.close_gate()
    rig.thread.submit(request("a", max_tokens=9))
    rig.wait_until_fetching()
    rig.thread.pause()
    rig.executor.gate.set()
    rig.wait_until(lambda: sum(len(output.token_ids) for [output] in rig.calls) == 2)


def test_aborts_and_deadlines_take_effect_while_paused(rig: Rig):
    """Case 6.7: fails if what ended is let go only when a step runs."""
    rig.close_gate()
    for name in ("running", "late"):
        rig.thread.submit(request(name, max_tokens=50, deadline_s=9.0 if name == "late" else None))
    rig.wait_until_fetching()
    rig.thread.pause()
    rig.executor.gate.set()
    rig.thread.submit(request("waiting", max_tokens=50))
    rig.thread.submit(request("late too", max_tokens=50, deadline_s=9.0))
    rig.thread.abort("running")
    rig.thread.abort("running")  # twice is no error, and brings one end
    rig.thread.abort("waiting", FinishReason.DEADLINE)
    answers = rig.wait_for("running", "waiting")
    assert answers["running"].finish_reason is FinishReason.CANCELLED
    assert answers["waiting"] == Answer(finish_reason=FinishReason.DEADLINE)
    rig.clock.now_s = 9.0
    answers = rig.wait_for("late", "late too")
    assert answers["late"].finish_reason is FinishReason.DEADLINE
    assert answers["late too"] == Answer(finish_reason=FinishReason.DEADLINE)
    load = rig.thread.load()
    assert (load.num_running, load.num_queued, load.num_free_pages) == (0, 0, 64)
    assert load.finished_total[FinishReason.CANCELLED] == 1
    assert load.is_paused


def test_all_that_was_submitted_is_aborted_and_what_comes_later_is_not(rig: Rig):
    rig.close_gate()
    names = [f"r{number}" for number in range(9)]
    for name in names:
        rig.thread.submit(request(name, max_tokens=50))
    rig.wait_until_fetching()
    rig.thread.submit(request("right before", max_tokens=50))
    rig.thread.abort_all(FinishReason.CANCELLED)
    rig.thread.abort_all(FinishReason.CANCELLED)
    rig.thread.submit(request("after", max_tokens=3))
    rig.executor.gate.set()
    answers = rig.wait_for(*names, "right before", "after")
    assert answers.pop("after").finish_reason is FinishReason.LENGTH
    assert {a.finish_reason for a in answers.values()} == {FinishReason.CANCELLED}
    rig.thread.abort_all(FinishReason.CANCELLED)  # nothing is live
    assert rig.thread.load().finished_total[FinishReason.CANCELLED] == 10


def test_a_pause_is_no_lack_of_progress_afterwards():
    """A health check would take the time before it for a hang."""
    rig = Rig()
    rig.thread.submit(request("a", max_tokens=2))
    rig.thread.pause()
    rig.clock.now_s = 3600.0
    rig.thread.resume()
    assert rig.thread.load().progress_s == 3600.0


def test_a_paused_engine_stops(rig: Rig):
    rig.thread.pause()
    rig.thread.submit(request("a", max_tokens=50))
    rig.thread.stop()
    assert rig.thread.join(WAIT_S)
    assert rig.answers()["a"].finish_reason is FinishReason.ERROR


def test_a_step_that_hangs_is_not_waited_for(rig: Rig):
    """Fails, by never ending, if whoever shuts down waits for the thread without a bound."""
    rig.close_gate()
    rig.thread.submit(request("a", max_tokens=50))
    rig.wait_until_fetching()
    rig.thread.stop()
    assert not rig.thread.join(0.01)
    rig.executor.gate.set()
    assert rig.thread.join(WAIT_S)


def test_a_failed_step_ends_all_requests_and_is_visible(rig: Rig):
    """Kind 1.2 and 6.7: neither streams that hang nor a health check that stays green."""
    rig.executor.fail_fetch.add(2)
    rig.close_gate()
    names = [f"r{number}" for number in range(9)]
    for name in names:
        rig.thread.submit(request(name, max_tokens=50))
    rig.executor.gate.set()
    answers = rig.wait_for(*names)
    assert all(answer.finish_reason is FinishReason.ERROR for answer in answers.values())
    assert rig.thread.load().failed
    with pytest.raises(EngineUnavailable, match="failed"):
        rig.thread.submit(request("late"))


def test_a_receiver_that_raises_stops_the_engine_as_failed(rig: Rig):
    """Its results are lost; going on would leave streams that never end."""

    def lose() -> None:
        rig.on_call = lambda: None
        raise OSError("the receiver is gone")

    rig.on_call = lose
    rig.thread.submit(request("a", max_tokens=50))
    assert rig.wait_for("a")["a"].finish_reason is FinishReason.ERROR
    assert rig.thread.load().failed


def test_a_request_whose_last_output_was_lost_gets_an_end(rig: Rig):
    """Breaks if only those are ended that the engine still has: the stream would never end."""

    def lose() -> None:
        rig.on_call = lambda: None
        raise OSError("the receiver is gone")

    rig.thread.submit(request("before", max_tokens=1))
    rig.wait_for("before")  # it must not end twice
    rig.on_call = lose
    rig.thread.submit(request("a", max_tokens=1))
    assert rig.wait_for("a")["a"] == Answer(finish_reason=FinishReason.ERROR)
    assert rig.thread.load().failed
    with pytest.raises(EngineUnavailable, match="failed"):
        rig.thread.submit(request("late"))


def test_a_receiver_that_always_raises_does_not_hide_that_the_engine_failed(rig: Rig):
    def lose() -> None:
        raise OSError("the receiver is gone")

    rig.on_call = lose
    rig.thread.submit(request("a", max_tokens=1))
    assert rig.thread.join(WAIT_S)
    assert rig.thread.load().failed
    assert rig.thread.load().num_queued == 0


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_was_recorded_is_kept_when_the_thread_fails(
    rig: Rig, is_broken: bool, monkeypatch: pytest.MonkeyPatch
):
    """A process that ends with os._exit loses what is in the buffer of a file."""
    closed: list[bool] = []

    def close() -> None:
        closed.append(True)
        if is_broken:
            raise ValueError("the disk is gone")

    def break_down() -> None:
        raise ArithmeticError("broken")

    monkeypatch.setattr(rig.engine, "close", close)
    monkeypatch.setattr(rig.engine, "step", break_down)
    rig.thread.submit(request("a"))
    assert rig.thread.join(WAIT_S)
    assert closed == [True]
    assert rig.answers()["a"].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("broken", ["add", "abort", "note", "load", "take_progress", "step"])
def test_whatever_breaks_in_the_thread_ends_all_requests_and_is_visible(
    rig: Rig, broken: str, monkeypatch: pytest.MonkeyPatch
):
    """Kind 1.2 outside a step too: a thread that dies in silence leaves streams that never end."""
    names = [f"r{number}" for number in range(9)]
    rig.close_gate()
    for name in names:
        rig.thread.submit(request(name, max_tokens=50))
    rig.wait_until_fetching()

    def break_down(*_: object, **__: object) -> None:
        raise ArithmeticError(broken)

    monkeypatch.setattr(rig.engine, broken, break_down)
    rig.thread.submit(request("one more", max_tokens=50))
    rig.thread.abort("r0")
    rig.thread.pause()
    rig.thread.resume()
    rig.executor.gate.set()
    answers = rig.wait_for(*names, "one more")
    ends = Counter(answer.finish_reason for answer in answers.values())
    assert ends[FinishReason.ERROR] >= 9, ends  # r0 may have been cancelled before
    load = rig.thread.load()
    assert load.failed
    assert (load.num_queued, load.num_running) == (0, 0)
    with pytest.raises(EngineUnavailable, match="failed"):
        rig.thread.submit(request("late"))


def test_notes_that_nobody_could_take_are_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    notes: list[dict[str, object]] = []
    monkeypatch.setattr(engine_thread, "MAX_NOTES", 4)
    monkeypatch.setattr(rig.engine, "note", notes.append)
    rig.close_gate()
    rig.thread.submit(request("a", max_tokens=50))
    rig.wait_until_fetching()
    for _ in range(5):
        rig.thread.pause()
        rig.thread.resume()
    rig.executor.gate.set()
    rig.wait_for("a")
    assert [note["what"] for note in notes] == ["paused", "resumed"] * 2 + ["notes_lost"]
    assert notes[-1]["count"] == 6


def test_load_counts_what_waits_and_runs(rig: Rig):
    rig.close_gate()
    for number in range(9):
        rig.thread.submit(request(f"r{number}", max_tokens=50))
    load = rig.thread.load()  # one: some may start to run before another
    assert load.num_queued + load.num_running == 9
    rig.executor.gate.set()
    rig.wait_for(*(f"r{number}" for number in range(9)))
    load = rig.thread.load()
    assert (load.num_queued, load.num_running) == (0, 0)
    assert load.num_free_pages == load.num_usable_pages == 64
    assert load.finished_total[FinishReason.LENGTH] == 9
    assert load.output_tokens_total == 9 * 50


def test_progress_starts_when_work_arrives_at_an_idle_engine():
    """A health check compares it with now; after an idle hour it must not look like a hang."""
    rig = Rig()
    rig.clock.now_s = 3600.0
    assert rig.thread.load().progress_s == 0.0
    rig.thread.submit(request("a", max_tokens=2))
    assert rig.thread.load().progress_s == 3600.0
    rig.clock.now_s = 3700.0
    rig.thread.submit(request("b", max_tokens=2))
    assert rig.thread.load().progress_s == 3600.0, "no step was done in 100 s"
    rig.thread.start()
    rig.wait_for("a", "b")
    assert rig.thread.load().progress_s == 3700.0
    rig.thread.stop()
    assert rig.thread.join(WAIT_S)

"""EngineThread: the one thread that calls Engine, and the way to it from all others.

Requests and aborts go into one inbox; results come out through one callback, once per step. Knows
no transport: front ends in this process or behind a pipe see the same records.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .admission import admit, choice_id, split_choice_id
from .admission_ledger import AdmissionLedger
from .engine import Engine
from .refusals import EngineUnavailable, InvalidRequest, Overloaded
from .request import FinishReason, Load, Place, Request, RequestOutput
from .request_progress import Progress, ProgressKind
from .schedule import RequestState

logger = logging.getLogger(__name__)

MAX_NOTES = 1024  # kept until the thread is awake; more are only counted

PAUSED_WAKE_S = 0.1
"""How late the deadline of a request may be noticed while the engine is paused."""


@dataclass(frozen=True)
class _Abort:
    """In the inbox: end this request."""

    request_id: str
    reason: FinishReason
    choice: int | None = None


class EngineThread:
    """Runs an engine; all public methods may be called from any thread.

    The thread sleeps when no request is live. While one is live the engine has a step to dispatch
    or to read, so deadlines need no timer: they are looked at before every step. Where everybody
    waits for a mask there is none, and engine.engine.IDLE_MASK_WAIT_S is the timer. The inbox is
    emptied before every step too, so an abort takes effect before the next one is scheduled,
    wherever the request is. While paused there are no steps, and a timer looks at deadlines.

    It takes requests until `stop`. Whoever wants to drain it closes the door in front of it.
    """

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[list[RequestOutput]], None],
        clock: Callable[[], float],
    ) -> None:
        """Takes over `engine`; nothing runs before `start`.

        Args:
          engine: Nobody else may call it from here on.
          on_outputs: Gets what a step brought, on this thread, at most once per step; must return
            soon. If it raises, results are lost: every request ends with an error, and the thread.
          clock: The engine's.
        """
        self._engine = engine
        self._on_outputs = on_outputs
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # Guards all below; `_changed` wakes the thread.
        self._changed = threading.Condition()
        self._inbox: deque[RequestState | _Abort] = deque()
        # A choice is live from submit until its last output is on its way, a request as long as any
        # of its choices is.
        self._ledger = self._make_ledger()
        self._num_choices: Counter[str] = Counter()
        self._leaving: list[str] = []  # whose last outputs are being handed over
        self._refused_total: Counter[str] = Counter()
        self._notes: list[dict[str, Any]] = []
        self._num_notes_lost = 0
        self._is_paused = False
        self._is_stopping = False
        self._load = engine.load()
        # When it last had reason to begin: until its first step after that, the progress of the
        # engine is older than the work.
        self._begun_s = self._load.progress_s

    def start(self) -> None:
        """Starts the thread; once."""
        self._thread.start()

    def submit(self, request: Request) -> Place:
        """Queues a request; its outputs follow through on_outputs, the last one always.

        Raises:
          InvalidRequest: it can never run, or its id is live.
          Overloaded: too much is waiting; says when to come back.
          EngineUnavailable: the engine failed or is shutting down.
        """
        state = admit(request, self._engine.config, self._engine.limits)
        with self._changed:
            if self._load.failed:
                raise EngineUnavailable("the engine has failed")
            if self._is_stopping:
                raise EngineUnavailable("the engine is shutting down")
            if request.request_id in self._num_choices:
                raise InvalidRequest(
                    "request_id", request.request_id, "another one: a request with it is live"
                )
            now_s = self._clock()
            place = Place(
                num_queued=self._ledger.num_queued,
                predicted_wait_s=self._ledger.predicted_wait_s(now_s),
            )
            try:
                self._ledger.enter(state, now_s)
            except Overloaded as refusal:
                self._refused_total[refusal.bound] += 1
                self._note(
                    "refused",
                    request_id=request.request_id,
                    bound=refusal.bound,
                    retry_after_s=refusal.retry_after_s,
                )
                raise
            if not self._num_choices:
                self._begun_s = now_s
            self._num_choices[request.request_id] = 1 + len(state.forks)
            self._inbox.append(state)
            self._changed.notify_all()
        return place

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        choice: int | None = None,
    ) -> None:
        """Ends a request, or one choice of it, before the next step is scheduled.

        Nothing happens if it is not live.
        """
        with self._changed:
            if request_id in self._num_choices:
                self._inbox.append(_Abort(request_id, reason, choice))
                self._changed.notify_all()

    def abort_all(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends every request that was submitted so far, before the next step is scheduled."""
        with self._changed:
            self._inbox.extend(_Abort(request_id, reason) for request_id in self._num_choices)
            self._changed.notify_all()

    def pause(self) -> None:
        """No step is dispatched until `resume`, but for one that is being dispatched right now.

        Requests are taken and wait; aborts and deadlines take effect, PAUSED_WAKE_S late at most,
        and what the step in flight brings is handed over. Twice is no error.
        """
        with self._changed:
            self._is_paused = True
            self._ledger.pause(self._clock())
            self._note("paused")

    def resume(self) -> None:
        """Goes on after `pause`; without one nothing happens."""
        with self._changed:
            if self._is_paused:
                self._is_paused = False
                self._note("resumed")
                self._begun_s = self._clock()
                self._ledger.resume(self._begun_s)
                self._changed.notify_all()

    def load(self) -> Load:
        """The load after the last step; what came in since then counts as queued."""
        with self._changed:
            return replace(
                self._load,
                num_queued=max(0, self._ledger.num_live - self._load.num_running),
                queued_tokens=self._ledger.queued_tokens,
                predicted_wait_s=self._ledger.predicted_wait_s(self._clock()),
                refused_total=dict(self._refused_total),
                progress_s=max(self._load.progress_s, self._begun_s),
                is_paused=self._is_paused,
            )

    def stop(self) -> None:
        """Ends what still runs, with FinishReason.ERROR, and then the thread; returns at once."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end after `stop`; False if time ran out."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("the engine thread failed")
            self._give_up()

    def _serve(self) -> None:
        engine = self._engine
        while True:
            with self._changed:
                is_ticking = self._is_paused and engine.has_work
                self._changed.wait_for(self._is_due, PAUSED_WAKE_S if is_ticking else None)
                inbox, self._inbox = self._inbox, deque()
                notes = self._take_notes()
                is_stopping = self._is_stopping
                is_paused = self._is_paused and not is_stopping
            for note in notes:
                engine.note(note)
            for item in inbox:
                if isinstance(item, RequestState):
                    engine.add(item)
                else:
                    engine.abort(item.request_id, item.reason, item.choice)
            if is_stopping:
                engine.end_all("the engine is shutting down")
            self._hand_over(engine.collect() if is_paused else engine.step())
            if is_stopping and not engine.has_work:
                engine.close()
                return

    def _give_up(self) -> None:
        """Ends every request without the engine, whose state nobody knows any more.

        Those too that have left, if their last outputs could not be handed over.
        """
        error = "the engine failed while the request was running"
        with self._changed:
            self._load = replace(self._load, failed=True, num_running=0)
            outputs: list[RequestOutput] = []
            for live_id in dict.fromkeys([*self._leaving, *self._ledger.live_ids()]):
                request_id, choice = split_choice_id(live_id)
                outputs.append(
                    RequestOutput(
                        request_id, choice=choice, finish_reason=FinishReason.ERROR, error=error
                    )
                )
            self._ledger = self._make_ledger()
            self._num_choices.clear()
            self._inbox.clear()
        try:
            if outputs:
                self._on_outputs(outputs)
        except Exception:
            logger.exception("the ends of %d requests could not be handed over", len(outputs))
        try:
            self._engine.close()
        except Exception:
            logger.exception("what the engine recorded may not be complete")

    def _make_ledger(self) -> AdmissionLedger:
        engine = self._engine
        return AdmissionLedger(
            engine.config, prefill_tokens_per_s=engine.prefill_tokens_per_s, now_s=self._clock()
        )

    def _note(self, what: str, **detail: float | str) -> None:
        """Keeps what was decided here for the engine's recorder."""
        if len(self._notes) < MAX_NOTES:
            self._notes.append({"at_s": self._clock(), "what": what} | detail)
        else:
            self._num_notes_lost += 1

    def _take_notes(self) -> list[dict[str, Any]]:
        """What was noted since the last call, and how much more there would have been."""
        notes = self._notes.copy()
        self._notes.clear()
        if self._num_notes_lost:
            lost = {"at_s": self._clock(), "what": "notes_lost", "count": self._num_notes_lost}
            notes.append(lost)
            self._num_notes_lost = 0
        return notes

    def _is_due(self) -> bool:
        """Whether the thread has something to do now.

        A step that is in flight when a pause begins is read at once: read late, its tokens would be
        late, and it would be taken for one that took long.
        """
        engine = self._engine
        has_step = engine.has_unread if self._is_paused else engine.has_work
        return bool(self._inbox) or self._is_stopping or has_step

    def _hand_over(self, outputs: list[RequestOutput]) -> None:
        """Publishes what a step changed and hands its outputs on.

        Whoever gets the last output of a request may use its id again at once, so it has left by
        then.
        """
        with self._changed:
            self._load = self._engine.load()
            now_s = self._clock()
            for progress in self._engine.take_progress():
                self._account(progress, now_s)
            for output in outputs:
                if output.finish_reason is not None:
                    self._leave(output, now_s)
        if outputs:
            self._on_outputs(outputs)
        self._leaving.clear()

    def _leave(self, output: RequestOutput, now_s: float) -> None:
        """One choice of a request has ended, or all of it with that."""
        live_id = choice_id(output.request_id, output.choice)
        self._leaving.append(live_id)
        self._ledger.left(live_id, now_s)
        self._num_choices[output.request_id] -= 1
        if not self._num_choices[output.request_id]:
            del self._num_choices[output.request_id]

    def _account(self, progress: Progress, now_s: float) -> None:
        """Tells the ledger of one turn of a request."""
        ledger, request_id, num_tokens = self._ledger, progress.request_id, progress.num_tokens
        match progress.kind:
            case ProgressKind.EXPECTED:
                ledger.expect(request_id, num_tokens)
            case ProgressKind.STARTED:
                ledger.started(request_id, now_s, num_tokens)
            case ProgressKind.COMPUTED:
                ledger.computed(request_id, num_tokens, now_s)
            case ProgressKind.REQUEUED:
                ledger.requeued(request_id, now_s, num_tokens)

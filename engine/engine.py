"""Engine: the host loop. Admits requests, runs steps one ahead of what it reads, hands out results.

Knows token ids only: no text, no transport, no threads. One thread calls it (see
engine.engine_thread). JAX stays behind the Executor.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..configs.engine_config import EngineConfig
from . import packing
from .admission import EngineLimits, pick_seed
from .choices import Choices, is_held_back
from .dispatch import DispatchedStep, Dispatcher, Executor, fetch
from .event_log import Recorder
from .guided_masks import GuideCompiler, GuidedEnd, GuidedMasks
from .load import Totals, load_of
from .packing import StepResult
from .request import FinishReason, Load, RequestOutput
from .request_progress import Progress, ProgressKind, progress_of, progress_to
from .schedule import PrefillChunk, RequestState, Schedule
from .scheduler import Scheduler
from .step_costs import StepCosts
from .step_outputs import (
    empty_output,
    last_output,
    prompt_output,
    rows_of_record,
    why_no_token,
    with_token,
)

logger = logging.getLogger(__name__)

MASK_WAIT = 0.2
"""Part of a step's time that the next one may wait for masks, while the device runs that step."""

IDLE_MASK_WAIT_S = 0.005
"""How long the engine waits for a mask when nothing else can go on, before it looks about."""


class Engine:
    """Runs requests to their ends.

    `step` dispatches step t + 1 before it reads step t, so the device does not wait for the host.
    What a step brings for a request that has ended meanwhile, or has lost its slot, is dropped.

    Attributes:
      failure: What broke the engine, or None. Device state may be gone with the step that failed,
        so a failed engine has ended all its requests and takes no new ones.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        executor: Executor,
        clock: Callable[[], float],
        costs: StepCosts,
        *,
        max_host_pages: int = 0,
        guides: GuideCompiler | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Starts idle.

        Args:
          config: Sizes of the engine, the same that the executor was compiled for.
          limits: What model and memory allow.
          executor: Runs the steps.
          clock: Seconds; monotonic; the clock of arrival_s and deadline_s.
          costs: What steps are predicted to take.
          max_host_pages: Pages that the executor may hold in host memory.
          guides: Makes guides for structured output. None: who asks for one fails.
          recorder: Is told everything that the scheduler is told and decides.
        """
        self.config = config
        self.limits = limits
        self.failure: Exception | None = None
        self._executor = executor
        self._clock = clock
        self._costs = costs
        self._dispatcher = Dispatcher(config, limits.vocab_size)
        self._scheduler = Scheduler(
            config,
            limits.num_pages,
            costs,
            max_host_pages=max_host_pages,
            keeps_events=recorder is not None,
        )
        self._recorder = recorder
        if recorder is not None:
            recorder.start(config, limits.num_pages, max_host_pages, costs)
        self._guides = GuidedMasks(guides)
        self._choices = Choices()
        self._released: list[RequestState] = []  # forks to be queued when a step was read
        self._in_flight: DispatchedStep | None = None
        self._outputs: list[RequestOutput] = []  # for the end of the step
        self._progress: list[Progress] = []
        self._totals = Totals()
        self._progress_s = self._read_s = clock()
        self._step_s = 0.0  # what the last step took

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._scheduler.live or self._in_flight or self._outputs)

    @property
    def has_unread(self) -> bool:
        """Whether a step was dispatched that was not read yet."""
        return self._in_flight is not None

    def add(self, state: RequestState) -> None:
        """Queues what `admit` let pass, its forks later. A failed engine ends it at once."""
        if not self.has_work:
            self._progress_s = self._clock()
        self._queue(state)
        self._choices.add(state)
        if state.request.sampling.seed is None:
            seed = pick_seed(self.config.seed, state.ordinal)
            for each in (state, *state.forks):
                each.seed = seed
        if self.failure is not None:
            self._end_between_steps([state], FinishReason.ERROR, error="the engine has failed")

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        choice: int | None = None,
    ) -> bool:
        """Ends a request before its time, or one choice of it; False if none such is live.

        It holds nothing from here on. Its last output comes from the next `step`.
        """
        found = self._choices.find(request_id, choice)
        self._end_between_steps(found, reason)
        return bool(found)

    def end_all(self, error: str) -> None:
        """Ends every live request with an error; the next `step` hands their last outputs out."""
        self._end_between_steps(list(self._choices), FinishReason.ERROR, error=error)

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step, then reads the one before; at most one output per choice.

        Never raises for what a step did: if one fails, every request ends with an error, after
        what the step brought for it by then, and `failure` says why.
        """
        return self._advance(is_dispatching=True)

    def collect(self) -> list[RequestOutput]:
        """As `step`, but no step is dispatched: for an engine that is paused."""
        return self._advance(is_dispatching=False)

    def _advance(self, *, is_dispatching: bool) -> list[RequestOutput]:
        try:
            if self._guides.has_pending:
                self._take_masks()
            now_s = self._clock()
            expired = self._scheduler.expired(now_s)
            for state in expired:
                self._end(state, FinishReason.DEADLINE, now_s)
            unread = self._in_flight
            schedule = self._schedule(now_s) if is_dispatching else None
            if self._recorder is not None:
                self._recorder.step(now_s, expired, schedule, made=is_dispatching)
            self._in_flight = None if schedule is None else self._dispatch(schedule, now_s)
            if unread is not None:
                self._read(unread)
            elif self._in_flight is None and self._guides.has_pending:
                self._guides.wait(IDLE_MASK_WAIT_S, for_all=False)  # nothing else can go on
            if unread is not None or self._in_flight is not None:
                self._progress_s = self._clock()
        except Exception as failure:
            # Whatever it was, device and host may no longer agree on what the slots hold.
            logger.exception("a step failed; the engine stops")
            self.fail(failure)
        outputs = self._outputs
        self._outputs = []
        return outputs

    def fail(self, failure: Exception) -> None:
        """Stops the engine for good; every live request ends with an error."""
        self.failure = failure
        self._in_flight = None
        self.end_all("the engine failed while the request was running")

    def note(self, note: dict[str, Any]) -> None:
        """Records what was decided outside the scheduler: "what", "at_s" and more."""
        if self._recorder is not None:
            self._recorder.note(note)

    def close(self) -> None:
        """Nothing follows: what was recorded is complete."""
        self._guides.close()
        if self._recorder is not None:
            self._recorder.close()

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens that it is predicted to compute in a second, with nothing beside."""
        return self._costs.prefill_tokens_per_s

    def take_progress(self) -> list[Progress]:
        """What happened to requests since the last call, for admission."""
        progress = self._progress.copy()
        self._progress.clear()
        return progress

    def load(self) -> Load:
        """How busy it is, and what it did so far; what only admission knows is 0."""
        return load_of(
            self._scheduler,
            self._totals,
            progress_s=self._progress_s,
            failed=self.failure is not None,
        )

    def check(self) -> None:
        """Asserts the invariants of what it owns. Tests call it after every step."""
        self._scheduler.check()

    def _schedule(self, now_s: float) -> Schedule | None:
        """Decides the next step, and tells admission who waits again."""
        schedule = self._scheduler.schedule(now_s)
        for state in self._scheduler.preempted:
            self._tell(ProgressKind.REQUEUED, state, state.prefill_end)
            self._tell(ProgressKind.EXPECTED, state, state.num_uncached_tokens)
        return schedule

    def _queue(self, state: RequestState) -> None:
        self._scheduler.add(state)
        self._tell(ProgressKind.EXPECTED, state, state.num_uncached_tokens)
        if self._recorder is not None:
            self._recorder.add(state, self._clock())
        if state.is_guided:
            self._guides.begin(state)

    def _dispatch(self, schedule: Schedule, now_s: float) -> DispatchedStep:
        self._progress += progress_of(schedule)
        step = self._dispatcher.dispatch(self._executor, schedule, now_s)
        self._totals.steps += 1
        return step

    def _tell(self, kind: ProgressKind, state: RequestState, num_tokens: int) -> None:
        self._progress.append(progress_to(kind, state, num_tokens))

    def _read(self, step: DispatchedStep) -> None:
        """Waits for a step and hands its tokens to their requests, in the order of its rows."""
        result = fetch(self._executor, step)
        read_s = self._clock()
        schedule = step.schedule
        # The step began when it was dispatched, or when the one before it was done.
        measured_s = read_s - max(step.at_s, self._read_s)
        self._scheduler.observe(schedule, measured_s)
        self._read_s, self._step_s = read_s, measured_s
        if self._recorder is not None and not self._recorder.has_ended:
            self._recorder.read(read_s, measured_s, rows_of_record(step, result))
        take_token, outputs = self._scheduler.take_token, self._outputs
        rows = zip(
            schedule.decodes, schedule.generations, result.token_ids, result.statuses, strict=False
        )
        # Most work per step is here, once per row: a row that only goes on takes the short way,
        # which names no arguments. The result has rows and segments of padding at the end.
        valid, num_plain = packing.VALID, 0
        for row, (state, generation, token_id, status) in enumerate(rows):
            if state.generation != generation:
                continue  # it has ended, or started over
            if status == valid and state.is_plain:
                take_token(state, token_id)
                outputs.append(RequestOutput(state.reply_to, (token_id,), state.choice))
                num_plain += 1
            else:
                self._take_sample(state, result, row, read_s)
        self._totals.output_tokens += num_plain
        at = 0
        for index, chunk in enumerate(schedule.chunks):
            if chunk.state.generation == chunk.generation:
                self._take_chunk(chunk, result, step.key.rows + index, at, read_s)
            at += chunk.length
        # Not before: a replay is told of them after all that the step brought.
        for fork in self._released:
            self._queue(fork)
        self._released.clear()

    def _take_chunk(
        self, chunk: PrefillChunk, result: StepResult, row: int, at: int, read_s: float
    ) -> None:
        """A chunk was computed; the last one of a prompt brings a token in `row` of the result.

        `at` is its place in the step's chunk.
        """
        output = prompt_output(chunk, result, at)
        chunk.state.num_prompt_logprobs += len(output.prompt_logprobs)
        if chunk.is_last or result.statuses[row] & packing.BROKEN:
            self._take_sample(chunk.state, result, row, read_s, chunk, output)
            return
        self._scheduler.take_chunk(chunk, None)
        if output.prompt_logprobs:
            self._outputs.append(output)

    def _take_sample(
        self,
        state: RequestState,
        result: StepResult,
        row: int,
        read_s: float,
        chunk: PrefillChunk | None = None,
        output: RequestOutput | None = None,
    ) -> None:
        """A token came for a request that is live, from a decode row or its last chunk.

        Args:
          state: Whose.
          result: What the step brought.
          row: Where in it.
          read_s: When it was read.
          chunk: The last chunk of its prompt, unless it came from a decode row.
          output: What the chunk brought besides.
        """
        status, token_id = result.statuses[row], result.token_ids[row]
        if not status & packing.VALID:
            is_broken = bool(status & packing.BROKEN)
            if not is_broken:
                # Host and device disagree on this request; the others are not touched by that.
                logger.error("no token came for %s, which is live", state.request.request_id)
            why = why_no_token(status)
            self._end(state, FinishReason.ERROR, read_s, error=why, is_broken=is_broken)
            return
        if chunk is None:
            self._scheduler.take_token(state, token_id)
        else:
            self._scheduler.take_chunk(chunk, token_id)
        self._totals.output_tokens += 1
        if state.first_token_s is None:
            state.first_token_s = read_s
            self._released += self._choices.held_back_by(state)
        output = with_token(output or empty_output(state), state, result, row)
        if status & packing.STOPPED:  # a stop id in the last place is still a stop
            self._end(state, FinishReason.STOP, read_s, output)
        elif status & packing.EXHAUSTED:
            self._end(state, FinishReason.LENGTH, read_s, output)
        else:
            self._outputs.append(output)
            if state.is_guided:
                self._guides.take(state, token_id)

    def _take_masks(self) -> None:
        """Lets guided requests go on whose masks are known; those whose guide failed end.

        Waits a little, as long as the device has a step to run: a request whose mask is late by a
        moment would sit out one more step.
        """
        if self._in_flight is not None:
            # What the last one took says nothing where that had a chunk and this has none.
            in_flight_s = min(self._step_s, self._costs.step_s(self._in_flight.key))
            self._guides.wait(MASK_WAIT * in_flight_s, with_slot=True)
        for known in self._guides.done():
            state = known.state
            if isinstance(known, GuidedEnd):
                self._end_between_steps([state], known.reason, error=known.error)
                continue
            state.mask = known.mask
            self._scheduler.take_mask(state)
            if self._recorder is not None:
                self._recorder.mask(state, self._clock())

    def _end_between_steps(
        self, states: Sequence[RequestState], reason: FinishReason, *, error: str | None = None
    ) -> None:
        now_s = self._clock()
        for state in states:
            if state not in self._choices:
                continue  # its leader has taken it along
            if self._recorder is not None and not is_held_back(state):
                self._recorder.end(state.request.request_id, reason, now_s)
            self._end(state, reason, now_s, error=error)

    def _end(
        self,
        state: RequestState,
        reason: FinishReason,
        now_s: float,
        output: RequestOutput | None = None,
        *,
        error: str | None = None,
        is_broken: bool = False,
    ) -> None:
        """Frees what a choice holds and makes `output`, or an empty one, its last."""
        self._choices.remove(state)
        if not is_held_back(state):
            self._scheduler.remove(state, now_s, is_broken=is_broken)
            if state.is_guided:
                self._guides.forget(state)
        self._totals.finished[reason] += 1
        output = output or empty_output(state)
        self._outputs.append(last_output(output, state, reason, now_s, error))
        if state.first_token_s is None:
            for fork in self._choices.held_back_by(state):
                self._end(fork, reason, now_s, error=error)

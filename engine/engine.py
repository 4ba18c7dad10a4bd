"""Engine: the host loop. Admits requests, runs steps one ahead of what it reads, hands out results.

Knows token ids only: no text, no transport, no threads. One thread calls it (see
engine.engine_thread). JAX stays behind the Executor.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..configs.engine_config import EngineConfig
from . import packing
from .admission import EngineLimits, pick_seed
from .event_log import Recorder
from .guided_masks import GuideCompiler, GuidedMasks
from .packing import StepResult
from .request import FinishReason, Load, RequestOutput, Timings
from .request_progress import Progress, ProgressKind
from .schedule import PrefillChunk, RequestState, Schedule, Transfer, TransferKind
from .scheduler import Scheduler
from .step_costs import StepCosts
from .step_shapes import StepKey, StepShapes

logger = logging.getLogger(__name__)

MASK_WAIT = 0.2
"""Part of a step's time that the next one may wait for masks, while the device runs that step."""

IDLE_MASK_WAIT_S = 0.005
"""How long the engine waits for a mask when nothing else can go on, before it looks about."""


@runtime_checkable
class Executor(Protocol):
    """Runs steps on the device, in the order in which they are dispatched."""

    def dispatch(
        self, key: StepKey, packed: np.ndarray, mask_rows: np.ndarray | None = None
    ) -> Any:
        """Starts a step and returns at once; the arrays belong to the step from here on."""

    def fetch(self, result: Any) -> np.ndarray:
        """Waits for what `dispatch` returned and brings it to the host."""

    def export_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Starts to copy each (page, handle) to host memory, as steps so far leave it."""

    def import_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Starts to copy each (handle, page) back, for steps dispatched from here on."""

    def drop_pages(self, handles: Sequence[int]) -> None:
        """Forgets copies in host memory."""


@dataclass(frozen=True, kw_only=True)
class _DispatchedStep:
    """A step that was not read yet.

    Attributes:
      key: Its executable.
      schedule: What it does.
      result: What dispatch returned.
      at_s: When it was dispatched.
    """

    key: StepKey
    schedule: Schedule
    result: Any
    at_s: float


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
          guides: Makes guides for structured output. None: no request may ask for one.
          recorder: Is told everything that the scheduler is told and decides.
        """
        self.config = config
        self.limits = limits
        self.failure: Exception | None = None
        self._executor = executor
        self._clock = clock
        self._costs = costs
        self._shapes = StepShapes.from_config(config)
        self._layouts = {
            layout.key: layout for layout in packing.upload_layouts(config, limits.vocab_size)
        }
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
        # By request, then by choice; choices whose leader computes the prompt are in no queue yet.
        self._choices: dict[str, dict[int, RequestState]] = {}
        self._forks: dict[RequestState, list[RequestState]] = {}
        self._in_flight: _DispatchedStep | None = None
        self._outputs: list[RequestOutput] = []  # for the end of the step
        self._progress: list[Progress] = []
        self._steps_total = 0
        self._output_tokens_total = 0
        self._finished_total: Counter[FinishReason] = Counter()
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
        """Queues what `admit` let pass. A failed engine ends it at once.

        Choices beyond the first are queued when its prompt is computed, whose pages they share.
        """
        if not self.has_work:
            self._progress_s = self._clock()
        self._choices[state.reply_to] = {each.choice: each for each in (state, *state.forks)}
        self._queue(state)
        if state.request.sampling.seed is None:
            state.seed = pick_seed(self.config.seed, state.ordinal)
        if state.forks:
            self._forks[state] = state.forks
        if self.failure is not None:
            self._end_between_steps(state, FinishReason.ERROR, error="the engine has failed")

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        choice: int | None = None,
    ) -> bool:
        """Ends a request before its time, or one choice of it; False if none such is live.

        It holds nothing from here on. Its last output comes from the next `step`.
        """
        choices = self._choices.get(request_id, {})
        found = [each for each in choices.values() if choice in (None, each.choice)]
        for state in found:
            if state.choice in choices:  # a choice 0 may take others with it
                self._end_between_steps(state, reason)
        return bool(found)

    def end_all(self, error: str) -> None:
        """Ends every live request with an error; the next `step` hands their last outputs out."""
        while self._choices:
            choices = next(iter(self._choices.values()))
            self._end_between_steps(next(iter(choices.values())), FinishReason.ERROR, error=error)

    def _queue(self, state: RequestState) -> None:
        self._scheduler.add(state)
        self._tell(ProgressKind.EXPECTED, state, state.num_uncached_tokens)
        if self._recorder is not None:
            self._recorder.add(state, self._clock())
        if state.is_guided:
            self._guides.begin(state)

    def _queue_forks(self, leader: RequestState) -> None:
        """The prompt of choice 0 is computed, or never will be: the others may begin."""
        for fork in self._forks.pop(leader, ()):
            fork.seed = leader.seed
            self._queue(fork)

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step, then reads the one before; at most one output per request.

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
        scheduler = self._scheduler
        memory = scheduler.memory
        return Load(
            num_queued=len(scheduler.waiting),
            num_running=len(scheduler.running) + len(scheduler.ending),
            num_usable_pages=memory.pool.num_usable,
            num_free_pages=memory.num_available,
            num_cached_pages=memory.cache.num_unheld,
            num_host_pages=memory.num_host_pages,
            steps_total=self._steps_total,
            preemptions_total=scheduler.preemptions_total,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            cached_tokens_total=scheduler.cached_tokens_total,
            output_tokens_total=self._output_tokens_total,
            finished_total={reason: self._finished_total[reason] for reason in FinishReason},
            evicted_pages_total={
                reason.value: count for reason, count in memory.cache.evicted.items()
            },
            evicted_age_s_total={
                reason.value: age_s for reason, age_s in memory.evicted_age_s.items() if age_s
            },
            exported_pages_total=memory.exported_pages,
            imported_pages_total=memory.imported_pages,
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

    def _dispatch(self, schedule: Schedule, now_s: float) -> _DispatchedStep:
        for chunk in schedule.chunks:
            if chunk.is_insert:
                self._tell(ProgressKind.STARTED, chunk.state, chunk.start)
            self._tell(ProgressKind.COMPUTED, chunk.state, chunk.length)
        for state in schedule.inserts:
            self._tell(ProgressKind.STARTED, state, state.first_computed)
            if state.is_past_prompt:
                self._tell(ProgressKind.COMPUTED, state, 1)
        if schedule.transfers:
            self._transfer(schedule.transfers)
        num_chunk_tokens = sum(chunk.length for chunk in schedule.chunks)
        key = self._shapes.key_for(len(schedule.decodes), num_chunk_tokens)
        layout = self._layouts[key]
        result = self._executor.dispatch(
            key, packing.pack(schedule, layout), packing.pack_masks(schedule, layout)
        )
        self._steps_total += 1
        return _DispatchedStep(key=key, schedule=schedule, result=result, at_s=now_s)

    def _tell(self, kind: ProgressKind, state: RequestState, num_tokens: int) -> None:
        self._progress.append(Progress(kind, state.request.request_id, num_tokens))

    def _transfer(self, transfers: Sequence[Transfer]) -> None:
        """Starts copies between device and host memory, each run of one kind together."""
        for kind, run in groupby(transfers, lambda transfer: transfer.kind):
            match kind:
                case TransferKind.EXPORT:
                    self._executor.export_pages([(each.page, each.handle) for each in run])
                case TransferKind.IMPORT:
                    self._executor.import_pages([(each.handle, each.page) for each in run])
                case TransferKind.DROP:
                    self._executor.drop_pages([each.handle for each in run])

    def _read(self, step: _DispatchedStep) -> None:
        """Waits for a step and hands its tokens to their requests, in the order of its rows."""
        result = packing.unpack(step.key, self._executor.fetch(step.result))
        read_s = self._clock()
        schedule = step.schedule
        # The step began when it was dispatched, or when the one before it was done.
        measured_s = read_s - max(step.at_s, self._read_s)
        self._scheduler.observe(schedule, measured_s)
        self._read_s, self._step_s = read_s, measured_s
        if self._recorder is not None and not self._recorder.has_ended:
            self._recorder.read(read_s, measured_s, _rows(step, result))
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
        self._output_tokens_total += num_plain
        at = 0
        for index, chunk in enumerate(schedule.chunks):
            if chunk.state.generation == chunk.generation:
                self._take_chunk(chunk, result, step.key.rows + index, at, read_s)
            at += chunk.length

    def _take_chunk(
        self,
        chunk: PrefillChunk,
        result: StepResult,
        row: int,
        at: int,
        read_s: float,
    ) -> None:
        """A chunk was computed; the last one of a prompt brings a token in `row` of the result.

        `at` is its place in the step's chunk.
        """
        output = _prompt_output(chunk, result, at)
        if chunk.is_last:
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
            is_broken, why = bool(status & packing.BROKEN), _why_broken(state, status)
            self._end(state, FinishReason.ERROR, read_s, error=why, is_broken=is_broken)
            return
        if chunk is None:
            self._scheduler.take_token(state, token_id)
        else:
            self._scheduler.take_chunk(chunk, token_id)
        self._output_tokens_total += 1
        if state.first_token_s is None:
            state.first_token_s = read_s
            self._queue_forks(state)
        output = (output or _empty_output(state))._replace(token_ids=(token_id,))
        sampling = state.request.sampling
        if sampling.logprobs:
            top_ids, top_logprobs = result.top(row, sampling.top_logprobs)
            output = output._replace(
                logprobs=(result.logprob(row),), top_token_ids=top_ids, top_logprobs=top_logprobs
            )
        if status & packing.STOPPED:  # a stop id in the last place is still a stop
            self._end(state, FinishReason.STOP, read_s, output, stop_token_id=token_id)
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
            self._guides.wait(MASK_WAIT * in_flight_s)
        for state, mask, error in self._guides.done():
            if mask is None:
                self._end_between_steps(state, FinishReason.ERROR, error=error)
                continue
            state.mask = mask
            self._scheduler.take_mask(state)
            if self._recorder is not None:
                self._recorder.mask(state, self._clock())

    def _end_between_steps(
        self, state: RequestState, reason: FinishReason, *, error: str | None = None
    ) -> None:
        now_s = self._clock()
        if self._recorder is not None:
            self._recorder.end(state.request.request_id, reason, now_s)
        self._end(state, reason, now_s, error=error)

    def _end(
        self,
        state: RequestState,
        reason: FinishReason,
        now_s: float,
        output: RequestOutput | None = None,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        is_broken: bool = False,
    ) -> None:
        """Frees what a request holds and makes `output`, or an empty one, its last."""
        choices = self._choices[state.reply_to]
        del choices[state.choice]
        if not choices:
            del self._choices[state.reply_to]
        if state.is_guided:
            self._guides.forget(state)
        forks = self._forks.get(state.leader or state, [])
        if state in forks:  # nothing was begun for it
            forks.remove(state)
        else:
            self._scheduler.remove(state, now_s, is_broken=is_broken)
        self._finished_total[reason] += 1
        self._outputs.append(
            (output or _empty_output(state))._replace(
                finish_reason=reason,
                stop_token_id=stop_token_id,
                error=error,
                num_cached_tokens=state.num_cached_tokens,
                num_preemptions=state.num_preemptions,
                timings=Timings(
                    arrival_s=state.request.arrival_s,
                    admitted_s=state.admitted_s,
                    first_token_s=state.first_token_s,
                    finished_s=now_s,
                ),
            )
        )
        # A choice 0 that ended before it had a token takes the others with it.
        for fork in list(self._forks.get(state, ())):
            self._end(fork, reason, now_s, error=error)
        self._forks.pop(state, None)


def _empty_output(state: RequestState) -> RequestOutput:
    return RequestOutput(state.reply_to, choice=state.choice)


def _why_broken(state: RequestState, status: int) -> str:
    """What the log gets too, where it is our fault."""
    if status & packing.BROKEN:
        return (
            "no token could be chosen: the model's logits are not finite, or no id is left that "
            "may come"
        )
    # Host and device disagree on this request; the others are not touched by that.
    logger.error("no token came for %s, which is live", state.request.request_id)
    return "the engine lost track of the request"


def _rows(step: _DispatchedStep, result: StepResult) -> list[list[int] | None]:
    """Token and status of each row of a step whose request is still there, for the recorder."""
    schedule = step.schedule
    decodes = zip(schedule.decodes, schedule.generations, strict=True)
    is_current = [state.generation == generation for state, generation in decodes]
    is_current += [chunk.state.generation == chunk.generation for chunk in schedule.chunks]
    num_decodes = len(schedule.decodes)
    at = [*range(num_decodes), *range(step.key.rows, step.key.rows + len(schedule.chunks))]
    return [
        [result.token_ids[row], result.statuses[row]] if current else None
        for row, current in zip(at, is_current, strict=True)
    ]


def _prompt_output(chunk: PrefillChunk, result: StepResult, at: int) -> RequestOutput:
    """Those of a chunk's log-probabilities that were not handed out; counts them as handed out.

    Chunk token i (from `start`) scores prompt token i + 1; the last prompt token scores none. A
    request that was preempted runs chunks again whose log-probabilities it has already given.

    Example: prompt of 6, handed out 2 (of tokens 1 and 2). Chunk [1, 4) scores tokens 2, 3, 4:
    the last two are fresh. Chunk [4, 6) scores token 5, and nothing after the prompt.

    Args:
      chunk: What was computed.
      result: What its step brought.
      at: Chunk tokens of other requests before it.
    """
    state, sampling = chunk.state, chunk.state.request.sampling
    output = _empty_output(state)
    if not sampling.prompt_logprobs:
        return output
    start = state.num_prompt_logprobs
    end = min(chunk.start + chunk.length, len(state.request.prompt_token_ids) - 1)
    if end <= start:
        return output
    state.num_prompt_logprobs = end
    places = at + start - chunk.start, at + end - chunk.start
    top_ids, top_logprobs = result.chunk_top(*places, sampling.prompt_top_logprobs)
    return output._replace(
        prompt_logprobs=result.chunk_logprobs(*places),
        prompt_top_token_ids=top_ids,
        prompt_top_logprobs=top_logprobs,
    )

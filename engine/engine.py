"""Engine: the host loop. Admits requests, runs steps one ahead of what it reads, hands out results.

Knows token ids only: no text, no transport, no threads. One thread calls it (see
engine.engine_thread). JAX stays behind the Executor.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..configs.engine_config import EngineConfig
from . import packing
from .admission import EngineLimits, pick_seed
from .packing import Sample
from .request import FinishReason, Load, RequestOutput, Timings
from .schedule import PrefillChunk, RequestState
from .scheduler import Scheduler
from .step_shapes import StepKey, StepShapes

logger = logging.getLogger(__name__)


@runtime_checkable
class Executor(Protocol):
    """Runs steps on the device, in the order in which they are dispatched."""

    def dispatch(self, key: StepKey, packed: np.ndarray) -> Any:
        """Starts a step and returns at once; `packed` belongs to the step from here on."""

    def fetch(self, result: Any) -> np.ndarray:
        """Waits for what `dispatch` returned and brings it to the host."""


@dataclass(frozen=True, kw_only=True)
class _DispatchedStep:
    """A step that was not read yet. The generations are those at dispatch.

    Attributes:
      key: Its executable.
      result: What dispatch returned.
      decodes: Request and generation of each decode row.
      chunks: Prompt chunk and its request's generation of each segment.
    """

    key: StepKey
    result: Any
    decodes: tuple[tuple[RequestState, int], ...]
    chunks: tuple[tuple[PrefillChunk, int], ...]


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
    ) -> None:
        """Starts idle.

        Args:
          config: Sizes of the engine, the same that the executor was compiled for.
          limits: What model and memory allow.
          executor: Runs the steps.
          clock: Seconds; monotonic; the clock of arrival_s and deadline_s.
        """
        self.config = config
        self.limits = limits
        self.failure: Exception | None = None
        self._executor = executor
        self._clock = clock
        self._shapes = StepShapes.from_config(config)
        self._layouts = {layout.key: layout for layout in packing.upload_layouts(config)}
        self._scheduler = Scheduler(config, limits.num_pages)
        self._in_flight: _DispatchedStep | None = None
        self._outputs: list[RequestOutput] = []  # for the end of the step
        self._steps_total = 0
        self._preemptions_total = 0
        self._prompt_tokens_total = 0
        self._output_tokens_total = 0
        self._finished_total: Counter[FinishReason] = Counter()
        self._progress_s = clock()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._scheduler.live or self._in_flight or self._outputs)

    def add(self, state: RequestState) -> None:
        """Queues what `admit` and `check_room` let pass. A failed engine ends it at once."""
        if not self.has_work:
            self._progress_s = self._clock()
        self._scheduler.add(state)
        if state.request.sampling.seed is None:
            state.seed = pick_seed(self.config.seed, state.ordinal)
        if self.failure is not None:
            self._end(state, FinishReason.ERROR, error="the engine has failed")

    def abort(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Ends a request before its time; False if none with this id is live.

        It holds nothing from here on. Its last output comes from the next `step`.
        """
        state = self._scheduler.live.get(request_id)
        if state is None:
            return False
        self._end(state, reason)
        return True

    def end_all(self, error: str) -> None:
        """Ends every live request with an error; the next `step` hands their last outputs out."""
        for state in list(self._scheduler.live.values()):
            self._end(state, FinishReason.ERROR, error=error)

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step, then reads the one before; at most one output per request.

        Never raises for what a step did: if one fails, every request ends with an error, after
        what the step brought for it by then, and `failure` says why.
        """
        try:
            now_s = self._clock()
            for state in self._scheduler.expired(now_s):
                self._end(state, FinishReason.DEADLINE)
            unread = self._in_flight
            self._in_flight = self._dispatch_next(now_s)
            if unread is not None:
                self._read(unread)
        except Exception as failure:
            # Whatever it was, device and host may no longer agree on what the slots hold.
            logger.exception("a step failed; the engine stops")
            self.fail(failure)
        self._progress_s = self._clock()
        outputs = self._outputs.copy()
        self._outputs.clear()
        return outputs

    def fail(self, failure: Exception) -> None:
        """Stops the engine for good; every live request ends with an error."""
        self.failure = failure
        self._in_flight = None
        self.end_all("the engine failed while the request was running")

    def load(self) -> Load:
        """How busy it is, and what it did so far."""
        scheduler = self._scheduler
        return Load(
            num_queued=len(scheduler.waiting),
            num_running=len(scheduler.running) + len(scheduler.ending),
            num_usable_pages=scheduler.pool.num_usable,
            num_free_pages=scheduler.pool.num_free,
            steps_total=self._steps_total,
            preemptions_total=self._preemptions_total,
            prompt_tokens_total=self._prompt_tokens_total,
            output_tokens_total=self._output_tokens_total,
            finished_total={reason: self._finished_total[reason] for reason in FinishReason},
            progress_s=self._progress_s,
            failed=self.failure is not None,
        )

    def check(self) -> None:
        """Asserts the invariants of what it owns. Tests call it after every step."""
        self._scheduler.check()

    def _dispatch_next(self, now_s: float) -> _DispatchedStep | None:
        schedule = self._scheduler.schedule(now_s)
        if schedule is None:
            return None
        self._preemptions_total += len(schedule.preempted)
        self._prompt_tokens_total += sum(
            len(chunk.state.request.prompt_token_ids)
            for chunk in schedule.chunks
            if chunk.is_insert and chunk.state.generation == 1
        )
        num_chunk_tokens = sum(chunk.length for chunk in schedule.chunks)
        key = self._shapes.key_for(len(schedule.decodes), num_chunk_tokens)
        result = self._executor.dispatch(key, packing.pack(schedule, self._layouts[key]))
        self._steps_total += 1
        return _DispatchedStep(
            key=key,
            result=result,
            decodes=tuple((state, state.generation) for state in schedule.decodes),
            chunks=tuple((chunk, chunk.state.generation) for chunk in schedule.chunks),
        )

    def _read(self, step: _DispatchedStep) -> None:
        """Waits for a step and hands its tokens to their requests, in the order of its rows."""
        result = packing.unpack(step.key, self._executor.fetch(step.result))
        read_s = self._clock()
        # The result has rows and segments of padding at the end.
        for (state, generation), sample in zip(step.decodes, result.decodes, strict=False):
            if self._is_current(state, generation):
                self._take_sample(state, sample, (), read_s)
        at = 0
        for (chunk, generation), sample in zip(step.chunks, result.chunks, strict=False):
            if self._is_current(chunk.state, generation):
                logprobs = result.chunk_logprobs[at : at + chunk.length].tolist()
                fresh = _fresh_prompt_logprobs(chunk, logprobs)
                if chunk.is_last:
                    self._take_sample(chunk.state, sample, fresh, read_s)
                elif fresh:
                    self._outputs.append(
                        RequestOutput(
                            request_id=chunk.state.request.request_id, prompt_logprobs=fresh
                        )
                    )
            at += chunk.length

    def _is_current(self, state: RequestState, generation: int) -> bool:
        """The request has not ended, nor started over, since it was in the step."""
        live = self._scheduler.live.get(state.request.request_id)
        return live is state and state.generation == generation

    def _take_sample(
        self,
        state: RequestState,
        sample: Sample,
        prompt_logprobs: tuple[float, ...],
        read_s: float,
    ) -> None:
        if not sample.status & packing.VALID:
            # Host and device disagree on this request; the others are not touched by that.
            logger.error("no token came for %s, which is live", state.request.request_id)
            self._end(state, FinishReason.ERROR, error="the engine lost track of the request")
            return
        state.output_token_ids.append(sample.token_id)
        self._output_tokens_total += 1
        if state.first_token_s is None:
            state.first_token_s = read_s
        logprobs = (sample.logprob,) if state.request.sampling.logprobs else ()
        output = RequestOutput(
            request_id=state.request.request_id,
            token_ids=(sample.token_id,),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        if sample.status & packing.STOPPED:  # a stop id in the last place is still a stop
            self._end(state, FinishReason.STOP, output, stop_token_id=sample.token_id)
        elif sample.status & packing.EXHAUSTED:
            self._end(state, FinishReason.LENGTH, output)
        else:
            self._outputs.append(output)

    def _end(
        self,
        state: RequestState,
        reason: FinishReason,
        output: RequestOutput | None = None,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> None:
        """Frees what a request holds and makes `output`, or an empty one, its last."""
        self._scheduler.remove(state)
        self._finished_total[reason] += 1
        self._outputs.append(
            replace(
                output or RequestOutput(request_id=state.request.request_id),
                finish_reason=reason,
                stop_token_id=stop_token_id,
                error=error,
                num_preemptions=state.num_preemptions,
                timings=Timings(
                    arrival_s=state.request.arrival_s,
                    admitted_s=state.admitted_s,
                    first_token_s=state.first_token_s,
                    finished_s=self._clock(),
                ),
            )
        )


def _fresh_prompt_logprobs(chunk: PrefillChunk, logprobs: list[float]) -> tuple[float, ...]:
    """Those of a chunk's log-probabilities that were not handed out; counts them as handed out.

    Chunk token i (from `start`) scores prompt token i + 1; the last prompt token scores none. A
    request that was preempted runs chunks again whose log-probabilities it has already given.

    Example: prompt of 6, handed out 2 (of tokens 1 and 2). Chunk [1, 4) scores tokens 2, 3, 4:
    the last two are fresh. Chunk [4, 6) scores token 5, and nothing after the prompt.
    """
    state = chunk.state
    if not state.request.sampling.prompt_logprobs:
        return ()
    num_scored = len(state.request.prompt_token_ids) - 1 - chunk.start
    fresh = tuple(logprobs[: max(num_scored, 0)][state.num_prompt_logprobs - chunk.start :])
    state.num_prompt_logprobs += len(fresh)
    return fresh

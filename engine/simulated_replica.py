"""SimulatedReplica: the real scheduler and admission against predicted step times. No JAX.

A device that takes exactly the predicted time per step, and a host that takes none. Steps are read
one behind, as engine.engine does: step t + 1 is dispatched before step t is read. Stretches in
which rows only decode are done at once (SimulatedScheduler.advance_decodes), with the same results.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..configs.engine_config import EngineConfig
from .admission_ledger import AdmissionLedger
from .events import Event
from .request import FinishReason, Request
from .schedule import RequestState, Schedule, TransferKind
from .simulated_scheduler import SimulatedScheduler
from .step_costs import StepCosts, chunk_kv_tokens
from .step_shapes import StepKey, StepShapes

OUTPUT_TOKEN = 1
"""What every step samples."""

MIN_JUMP_ROUNDS = 3  # fewer are as fast one by one


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What one replica is.

    Attributes:
      config: Sizes, policy and bounds.
      num_pages: Of its KV pool, page 0 included.
      costs: How long steps take, and what the scheduler believes of it.
      max_host_pages: That host memory holds.
      has_ledger: Bounds are enforced, and refusals computed; else everyone is let in.
      jumps: Decode-only stretches are done at once.
      keeps_events: Whether `events` of steps are handed to on_events.
    """

    config: EngineConfig
    num_pages: int
    costs: StepCosts
    max_host_pages: int = 0
    has_ledger: bool = False
    jumps: bool = True
    keeps_events: bool = False


class _Step(NamedTuple):
    """A step in flight."""

    schedule: Schedule
    key: StepKey
    decode_kv_tokens: int
    ready_s: float


class SimulatedReplica:
    """One engine with its clock. Runs when told to, up to a time.

    Attributes:
      scheduler: The real one.
      ledger: The real one, or None.
      now_s: When its last step was read, or later.
      num_steps: Steps dispatched; num_jumped_steps of them in stretches.
      output_tokens_total: Output tokens read.
      busy_s: Seconds in which the device ran steps.
      served: Tokens computed (uncached prompt, and output) for each tenant.
    """

    def __init__(
        self,
        deployment: Deployment,
        on_end: Callable[[RequestState, FinishReason, float], None],
        on_events: Callable[[Sequence[Event]], None] = lambda events: None,
    ) -> None:
        """Idle at time 0.

        Args:
          deployment: What it is.
          on_end: Called when a request ends, with the reason and the time.
          on_events: Gets what the scheduler decided.
        """
        config, costs = deployment.config, deployment.costs
        self.config = config
        self.scheduler = SimulatedScheduler(
            config,
            deployment.num_pages,
            costs,
            max_host_pages=deployment.max_host_pages,
            keeps_events=deployment.keeps_events,
        )
        self.ledger = (
            AdmissionLedger(config, prefill_tokens_per_s=costs.prefill_tokens_per_s, now_s=0.0)
            if deployment.has_ledger
            else None
        )
        self.now_s = 0.0
        self.num_steps = self.num_jumped_steps = 0
        self.output_tokens_total = 0
        self.busy_s = 0.0
        self.served: dict[str, int] = {}
        self._costs = costs
        self._shapes = StepShapes.from_config(config)
        self._jumps = deployment.jumps
        self._on_end, self._on_events = on_end, on_events
        self._in_flight: deque[_Step] = deque()  # at most two
        self._stop_at: dict[RequestState, int] = {}  # outputs after which a stop id comes
        self._wake_s = math.inf  # when the host is next free to dispatch
        self._device_free_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Nothing is live or in flight."""
        return self._wake_s == math.inf

    def submit(self, request: Request, num_output_tokens: int, max_tokens: int) -> RequestState:
        """Takes a request at its arrival time, up to which the replica has run.

        Args:
          request: Comes now.
          num_output_tokens: After so many a stop id comes; no more than max_tokens.
          max_tokens: Most outputs that it asks for.

        Raises:
          Overloaded: The ledger refuses it.
        """
        now_s = request.arrival_s
        state = RequestState(request=request, max_tokens=max_tokens, stop_ids=())
        if self.ledger is not None:
            self.ledger.enter(state, now_s)
        self.scheduler.add(state)
        self._expect(state)
        self._stop_at[state] = num_output_tokens
        if self.is_idle:
            self._wake_s = now_s
        return state

    def predicted_wait_s(self, now_s: float) -> float:
        """Seconds that a request would wait for its first chunk if it came now."""
        if self.ledger is not None:
            return self.ledger.predicted_wait_s(now_s)
        queued_tokens = sum(state.num_uncached_tokens for state in self.scheduler.waiting)
        return queued_tokens / self._costs.prefill_tokens_per_s

    def advance(self, until_s: float) -> None:
        """Does everything that begins before `until_s`."""
        while self._wake_s < until_s:
            self.now_s = self._wake_s
            if self._in_flight and self._in_flight[0].ready_s <= self.now_s:
                self._read(self._in_flight.popleft(), self.now_s)
            if self._jumps and len(self._in_flight) == 1:
                self._jump(until_s)
            self._dispatch_next()

    def _dispatch_next(self) -> None:
        """One call of Engine.step, up to where it waits for the device."""
        now_s, scheduler = self.now_s, self.scheduler
        for state in scheduler.expired(now_s):
            self._end(state, FinishReason.DEADLINE, now_s)
        schedule = scheduler.schedule(now_s)
        for state in scheduler.preempted:
            if self.ledger is not None:
                self.ledger.requeued(state.request.request_id, now_s, state.prefill_end)
                self._expect(state)
        if schedule is not None:
            self._dispatch(schedule, now_s)
        if not self._in_flight:
            self._wake_s = math.inf
        elif schedule is not None and len(self._in_flight) == 1:
            self._wake_s = now_s  # there was nothing to read, so the next one is dispatched at once
        else:
            self._wake_s = self._in_flight[0].ready_s

    def _expect(self, state: RequestState) -> None:
        """Tells the ledger what of a request that begins to wait is not in the prefix cache."""
        if self.ledger is not None:
            self.ledger.expect(state.request.request_id, state.num_uncached_tokens)

    def _dispatch(self, schedule: Schedule, now_s: float) -> None:
        num_chunk_tokens = chunk_kv = 0
        ledger = self.ledger
        for chunk in schedule.chunks:
            num_chunk_tokens += chunk.length
            chunk_kv += chunk_kv_tokens(chunk.start, chunk.length)
            tenant = chunk.state.request.tenant
            end = chunk.start + chunk.length
            fresh = max(0, end - max(chunk.start, chunk.state.num_charged_tokens))
            self.served[tenant] = self.served.get(tenant, 0) + fresh
            if ledger is not None:
                request_id = chunk.state.request.request_id
                if chunk.is_insert:
                    ledger.started(request_id, now_s, chunk.start)
                ledger.computed(request_id, chunk.length, now_s)
        if schedule.events:
            self._on_events(schedule.events)
        key = self._shapes.key_for(len(schedule.decodes), num_chunk_tokens)
        step_s = self._costs.step_s(
            key, decode_kv_tokens=schedule.decode_kv_tokens, chunk_kv_tokens=chunk_kv
        )
        if schedule.transfers:
            imports = sum(each.kind is TransferKind.IMPORT for each in schedule.transfers)
            step_s += self._costs.import_pages_s(imports)
        start_s = max(now_s, self._device_free_s)
        self._device_free_s = start_s + step_s
        self.busy_s += step_s
        self.num_steps += 1
        self._in_flight.append(_Step(schedule, key, schedule.decode_kv_tokens, self._device_free_s))

    def _read(self, step: _Step, read_s: float) -> None:
        """What Engine._read does, for tokens that are all the same."""
        schedule, stop_at, served = step.schedule, self._stop_at, self.served
        take_token = self.scheduler.take_token
        for state, generation in zip(schedule.decodes, schedule.generations, strict=True):
            if state.generation == generation:
                take_token(state, OUTPUT_TOKEN)
                self.output_tokens_total += 1
                served[state.request.tenant] += 1
                if len(state.output_token_ids) == stop_at[state]:
                    self._end_by_token(state, read_s)
        for chunk in schedule.chunks:
            state = chunk.state
            if state.generation != chunk.generation:
                continue
            self.scheduler.take_chunk(chunk, OUTPUT_TOKEN if chunk.is_last else None)
            if chunk.is_last:
                self.output_tokens_total += 1
                served[state.request.tenant] += 1
                if state.first_token_s is None:
                    state.first_token_s = read_s
                if len(state.output_token_ids) == stop_at[state]:
                    self._end_by_token(state, read_s)

    def _end_by_token(self, state: RequestState, now_s: float) -> None:
        is_length = len(state.output_token_ids) == state.max_tokens
        self._end(state, FinishReason.LENGTH if is_length else FinishReason.STOP, now_s)

    def _end(self, state: RequestState, reason: FinishReason, now_s: float) -> None:
        self.scheduler.remove(state, now_s)
        if self.ledger is not None:
            self.ledger.left(state.request.request_id, now_s)
        del self._stop_at[state]
        self._on_end(state, reason, now_s)

    def _jump(self, until_s: float) -> None:
        """Does rounds in which rows only decode, as long as they begin and end before until_s."""
        (unread,) = self._in_flight
        scheduler, stop_at, rows = self.scheduler, self._stop_at, unread.schedule.decodes
        until_s = min(until_s, scheduler.next_deadline_s)
        if unread.schedule.chunks or unread.ready_s >= until_s:
            return
        most = min(stop_at.get(row, 0) - len(row.output_token_ids) for row in rows) - 1
        if most < MIN_JUMP_ROUNDS:
            return
        rounds = scheduler.num_steady_rounds(unread.schedule, self.now_s, most)
        if rounds < MIN_JUMP_ROUNDS:
            return
        step_s, key, num_rows = self._costs.step_s, unread.key, len(rows)
        kv_tokens, ready_s, now_s = unread.decode_kv_tokens, unread.ready_s, self.now_s
        busy_s = self.busy_s
        times_s: list[float] = []
        while ready_s < until_s and len(times_s) < rounds:
            times_s.append(now_s)
            now_s = ready_s  # the step in flight is read
            kv_tokens += num_rows
            seconds = step_s(key, decode_kv_tokens=kv_tokens)
            ready_s += seconds
            busy_s += seconds
        scheduler.advance_decodes(times_s, OUTPUT_TOKEN)
        count = len(times_s)
        self._in_flight[0] = _Step(unread.schedule, key, kv_tokens, ready_s)
        self._device_free_s, self.now_s, self.busy_s = ready_s, now_s, busy_s
        self.num_steps += count
        self.num_jumped_steps += count
        self.output_tokens_total += count * num_rows
        for row in rows:
            self.served[row.request.tenant] += count

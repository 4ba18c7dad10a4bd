"""A small world around an AdmissionLedger: slots, prompts, and clients that do as they are told.

Events in order of time, no clock: prompts are computed one after the other at a fixed pace, an
output takes a random time in its slot, and a request starts when a slot is free and no prompt is
under way. A client that is refused comes back once, when it was told to, a little late.
"""

import dataclasses
import heapq
import itertools
import json
import random
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Protocol

from octavo.configs.engine_config import EngineConfig
from octavo.configs.scheduling_config import SchedulingConfig
from octavo.engine.admission_ledger import AdmissionLedger
from octavo.engine.refusals import Overloaded
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.schedule import RequestState

CHUNK_TOKENS = 128
LATE_S = 0.2  # on the mean


@dataclass(kw_only=True)
class World:
    """What comes, and what serves it.

    Attributes:
      arrivals_per_s: Fresh requests, Poisson.
      for_s: How long they keep coming; the run is over then.
      seed: Of all random numbers.
      num_slots: Slots.
      scheduling: Bounds.
      num_tenants: Among which requests are drawn evenly.
      output_s: Mean time in a slot after the prompt, exponential.
      prompt_tokens: Range, uniform.
      tokens_per_s: Pace of computing prompts.
      told_tokens_per_s: What the ledger is told of it at the start.
      returning_share: The part of refused clients that come back.
    """

    arrivals_per_s: float
    for_s: float
    seed: int
    num_slots: int = 8
    scheduling: SchedulingConfig = field(
        default_factory=lambda: SchedulingConfig(max_num_queued=24)
    )
    num_tenants: int = 1
    output_s: float = 1.5
    prompt_tokens: tuple[int, int] = (20, 200)
    tokens_per_s: float = 4000.0
    told_tokens_per_s: float = 4000.0
    returning_share: float = 1.0


@dataclass(kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
      num_fresh: Requests that came for the first time.
      num_refused: Those refused.
      num_returned: Clients that came back.
      num_let_in: Those of them that were let in.
      num_promised: Of those that came back, those for whom a place was kept.
      num_kept: Those of them that were let in.
      num_ended: Requests served.
      busy_s: Seconds of slots that were held.
      num_computed_tokens: Prompt tokens computed.
      waits_s: [predicted, actual] wait for a slot of those let in.
    """

    num_fresh: int = 0
    num_refused: int = 0
    num_returned: int = 0
    num_let_in: int = 0
    num_promised: int = 0
    num_kept: int = 0
    num_ended: int = 0
    busy_s: float = 0.0
    num_computed_tokens: int = 0
    waits_s: list[list[float]] = field(default_factory=list)

    @property
    def success(self) -> float:
        """Of first retries."""
        return self.num_let_in / self.num_returned

    def wait_error(self, at_least_s: float) -> float:
        """The relative error of predicted waits that 90 % stay below, of waits not shorter."""
        errors = [abs(p - a) / a for p, a in self.waits_s if a >= at_least_s]
        return sorted(errors)[int(len(errors) * 0.9)] if errors else 0.0


class Ledger(Protocol):
    """What the world calls."""

    @property
    def num_promises(self) -> int: ...
    def predicted_wait_s(self, now_s: float) -> float: ...
    def enter(self, state: RequestState, now_s: float) -> None: ...
    def started(self, request_id: str, now_s: float, num_cached_tokens: int) -> None: ...
    def computed(self, request_id: str, num_tokens: int, now_s: float) -> None: ...
    def left(self, request_id: str, now_s: float) -> None: ...


class CountingLedger:
    """Without promises: counts, and tells all to come back in a second."""

    num_promises = 0

    def __init__(self, most: int) -> None:
        self._most = most
        self._live: set[str] = set()

    def predicted_wait_s(self, now_s: float) -> float:
        return 0.0

    def enter(self, state: RequestState, now_s: float) -> None:
        if len(self._live) >= self._most:
            raise Overloaded("full", "max_num_queued", 1.0)
        self._live.add(state.request.request_id)

    def started(self, request_id: str, now_s: float, num_cached_tokens: int) -> None:
        pass

    def computed(self, request_id: str, num_tokens: int, now_s: float) -> None:
        pass

    def left(self, request_id: str, now_s: float) -> None:
        self._live.remove(request_id)


def simulate(world: World, ledger: Ledger | None = None) -> Outcome:
    """Runs it; the default ledger is the real one."""
    config = EngineConfig(max_num_seqs=world.num_slots, scheduling=world.scheduling)
    if ledger is None:
        ledger = AdmissionLedger(config, prefill_tokens_per_s=world.told_tokens_per_s, now_s=0.0)
    return _Run(world, ledger).outcome


def run_apart(worlds: list[World]) -> list[tuple[Outcome, Outcome]]:
    """Runs worlds with and without promises in a process of its own.

    There annotations are not checked at every call, which would take twenty times as long.
    """
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([dataclasses.asdict(world) for world in worlds]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(Outcome(**one), Outcome(**other)) for one, other in json.loads(done.stdout)]


def _main() -> None:
    pairs = []
    for fields in json.load(sys.stdin):
        scheduling = fields.pop("scheduling")
        scheduling["tenant_weights"] = tuple(map(tuple, scheduling["tenant_weights"]))
        fields["prompt_tokens"] = tuple(fields["prompt_tokens"])
        world = World(**fields, scheduling=SchedulingConfig(**scheduling))
        counting = CountingLedger(world.num_slots + world.scheduling.max_num_queued)
        pairs.append([vars(simulate(world)), vars(simulate(world, counting))])
    json.dump(pairs, sys.stdout)


class _Run:
    def __init__(self, world: World, ledger: Ledger) -> None:
        self.world, self.ledger, self.outcome = world, ledger, Outcome()
        self._arrivals = random.Random(world.seed)  # the same, whatever the ledger does
        self._others = random.Random(world.seed + 1)
        self._events: list[tuple[float, int, str, object]] = []
        self._order = itertools.count()
        self._queue: list[tuple[RequestState, float, float]] = []
        self._free, self._prompt_left = world.num_slots, 0
        self._is_promised = False  # whether a place is kept for the one refused last
        self._at(self._arrivals.expovariate(world.arrivals_per_s), "fresh", None)
        now_s = 0.0
        while (event := heapq.heappop(self._events))[0] < world.for_s:
            self.outcome.busy_s += (world.num_slots - self._free) * (event[0] - now_s)
            now_s = event[0]
            getattr(self, f"_{event[2]}")(event[3], now_s)
            self._start(now_s)

    def _at(self, time_s: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), kind, what))

    def _fresh(self, _: None, now_s: float) -> None:
        self._at(now_s + self._arrivals.expovariate(self.world.arrivals_per_s), "fresh", None)
        number = self.outcome.num_fresh
        self.outcome.num_fresh += 1
        prompt = [number] * self._arrivals.randint(*self.world.prompt_tokens)
        tenant = f"t{self._arrivals.randrange(self.world.num_tenants)}"
        if (retry_after_s := self._enter(tenant, prompt, now_s)) is not None:
            self.outcome.num_refused += 1
            if self._others.random() < self.world.returning_share:
                back_s = now_s + retry_after_s + self._others.expovariate(1 / LATE_S)
                self._at(back_s, "return", (tenant, prompt, self._is_promised))

    def _return(self, what: tuple[str, list[int], bool], now_s: float) -> None:
        tenant, prompt, is_promised = what
        is_let_in = self._enter(tenant, prompt, now_s) is None
        self.outcome.num_returned += 1
        self.outcome.num_let_in += is_let_in
        self.outcome.num_promised += is_promised
        self.outcome.num_kept += is_promised and is_let_in

    def _enter(self, tenant: str, prompt: list[int], now_s: float) -> float | None:
        """Tries; if refused, the seconds after which to come back."""
        request = Request(
            request_id=f"r{next(self._order)}",  # a new one every time
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=100),
            arrival_s=now_s,
            tenant=tenant,
        )
        state = RequestState(request=request, max_tokens=100, stop_ids=())
        predicted_s = self.ledger.predicted_wait_s(now_s)
        num_promises = self.ledger.num_promises
        try:
            self.ledger.enter(state, now_s)
        except Overloaded as refusal:
            self._is_promised = self.ledger.num_promises > num_promises
            return refusal.retry_after_s
        self._queue.append((state, now_s, predicted_s))
        return None

    def _start(self, now_s: float) -> None:
        if not (self._queue and self._free and not self._prompt_left):
            return
        state, entered_s, predicted_s = self._queue.pop(0)
        self._free -= 1
        self.ledger.started(state.request.request_id, now_s, 0)
        self.outcome.waits_s.append([predicted_s, now_s - entered_s])
        self._prompt_left = len(state.request.prompt_token_ids)
        self._next_chunk(state, now_s)

    def _next_chunk(self, state: RequestState, now_s: float) -> None:
        length = min(self._prompt_left, CHUNK_TOKENS)
        self._at(now_s + length / self.world.tokens_per_s, "chunk", (state, length))

    def _chunk(self, what: tuple[RequestState, int], now_s: float) -> None:
        state, length = what
        self.ledger.computed(state.request.request_id, length, now_s)
        self._prompt_left -= length
        self.outcome.num_computed_tokens += length
        if self._prompt_left:
            self._next_chunk(state, now_s)
        else:
            output_s = self._others.expovariate(1 / self.world.output_s)
            self._at(now_s + output_s, "end", state.request.request_id)

    def _end(self, request_id: str, now_s: float) -> None:
        self._free += 1
        self.outcome.num_ended += 1
        self.ledger.left(request_id, now_s)


if __name__ == "__main__":
    _main()

"""The simulator runs the real scheduler; jumping over decode-only stretches changes nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine.events import Event
from octavo.engine.request import FinishReason
from octavo.engine.schedule import RequestState
from octavo.engine.simulated_replica import Deployment, SimulatedReplica
from octavo.engine.simulated_traffic import Arrival, Stream, arrivals
from octavo.engine.simulator import Fleet, Simulator, simulate

from .fakes import planned_costs, small_config

MAX_MODEL_LEN = 200


def _deployment(config: EngineConfig | None = None, **changes: Any) -> Deployment:
    config = config or small_config(max_num_seqs=8, prefill_chunk_tokens=32, page_size=4)
    costs = planned_costs(config, decode_kv_token_s=1.3e-7, chunk_kv_token_s=1e-8)
    values = {"config": config, "num_pages": 8 * MAX_MODEL_LEN // config.page_size, "costs": costs}
    return Deployment(**(values | changes))


def _streams(rate_per_s: float) -> list[Stream]:
    """Two tenants that share beginnings of prompts, priorities, targets, deadlines."""
    return [
        Stream(tenant="a", rate_per_s=rate_per_s, prompt_tokens=12, output_tokens=12),
        Stream(
            tenant="b",
            rate_per_s=rate_per_s / 2,
            prompt_tokens=8,
            output_tokens=24,
            num_prefixes=3,
            prefix_tokens=17,
            priority=2,
            ttft_target_s=0.05,
            tpot_target_s=0.0012,
        ),
        Stream(
            tenant="b",
            request_class="hurried",
            rate_per_s=rate_per_s / 8,
            prompt_tokens=30,
            output_tokens=8,
            deadline_after_s=0.2,
            queue_ttl_s=0.1,
        ),
    ]


class _Recording:
    """One replica, everything that can be told of it."""

    def __init__(self, deployment: Deployment) -> None:
        self.ends: list[tuple[Any, ...]] = []
        self.events: list[Event] = []
        self.replica = SimulatedReplica(deployment, self._on_end, self._on_events)

    def run(self, requests: Sequence[Arrival], max_tokens: int | None) -> None:
        for arrival in requests:
            self.replica.advance(arrival.request.arrival_s)
            most = max(arrival.num_output_tokens, max_tokens or 0)
            self.replica.submit(arrival.request, arrival.num_output_tokens, most)
        self.replica.advance(float("inf"))
        self.replica.scheduler.check()
        self.events += self.replica.scheduler.memory.events  # which no later step carries

    def _on_end(self, state: RequestState, reason: FinishReason, now_s: float) -> None:
        times = (state.admitted_s, state.first_token_s, now_s)
        counts = (len(state.output_token_ids), state.num_cached_tokens, state.num_preemptions)
        self.ends.append((state.request.request_id, reason, *times, *counts))

    def _on_events(self, events: Sequence[Event]) -> None:
        self.events += events

    @property
    def final(self) -> tuple[object, ...]:
        """The state of pool and cache, and the counters."""
        replica, memory = self.replica, self.replica.scheduler.memory
        nodes = [
            (node.key, node.page, node.handle, node.stamp, node.used_s) for node in memory.cache
        ]
        return (
            nodes,
            memory.pool._free,
            dict(memory.cache.evicted),
            (replica.num_steps, replica.busy_s, replica.output_tokens_total, replica.served),
            (replica.scheduler.cached_tokens_total, replica.scheduler.preemptions_total),
        )


CASES = [
    # policy, page size, pages, host pages, rate, longest output asked for
    ("fcfs", 4, 400, 0, 60.0, None),
    ("fcfs", 16, 60, 0, 60.0, 150),
    ("priority", 4, 130, 40, 120.0, None),
    ("fair", 4, 130, 0, 120.0, 150),
    ("fair", 16, 100, 0, 60.0, None),
    ("deadline", 8, 80, 0, 120.0, None),
    ("deadline", 16, 100, 20, 60.0, 150),
]


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("policy", "page_size", "num_pages", "max_host_pages", "rate_per_s", "max_tokens"), CASES
)
def test_jumping_equals_stepping(
    policy: str,
    page_size: int,
    num_pages: int,
    max_host_pages: int,
    rate_per_s: float,
    max_tokens: int | None,
    count: int,
):
    """Every time of every request, every event, and where each page ends up.

    Breaks if a stretch is taken for decode-only in which somebody could have started, ended or
    been preempted, or if pages are allocated, evicted or published in another order.
    """
    config = small_config(
        max_num_seqs=8,
        prefill_chunk_tokens=32,
        page_size=page_size,
        policy=policy,
        tenant_weights=(("b", 3.0),) if policy == "fair" else (),
    )
    deployment = _deployment(
        config, num_pages=num_pages, max_host_pages=max_host_pages, keeps_events=True
    )
    stream = arrivals(_streams(rate_per_s), seed=1, max_model_len=MAX_MODEL_LEN)
    requests = [next(stream) for _ in range(count)]
    runs = [_Recording(replace(deployment, jumps=jumps)) for jumps in (True, False)]
    for run in runs:
        run.run(requests, max_tokens)
    jumping, stepping = runs
    assert len(jumping.ends) == count
    assert jumping.ends == stepping.ends
    assert jumping.events == stepping.events
    assert jumping.final == stepping.final
    assert jumping.replica.num_jumped_steps > jumping.replica.num_steps / 20
    assert stepping.replica.num_jumped_steps == 0


def test_steps_are_read_one_behind():
    """A request alone: chunk, then one row per step, each read when the device is done with it.

    Breaks if the simulated host waits for a step before it dispatches the next one, or if steps
    overlap on the device.
    """
    run = _Recording(_deployment())
    (stream,) = _streams(1.0)[:1]
    arrival = next(arrivals([stream], seed=0, max_model_len=MAX_MODEL_LEN))
    run.run([arrival._replace(num_output_tokens=5)], None)
    replica = run.replica
    ((_, reason, admitted_s, first_token_s, finished_s, *_),) = run.ends
    assert reason is FinishReason.LENGTH
    assert admitted_s == arrival.request.arrival_s
    assert replica.num_steps == 5
    # The device was never idle in between: what the request took is what its steps took.
    assert finished_s - admitted_s == pytest.approx(replica.busy_s)
    assert first_token_s - admitted_s == pytest.approx(replica.busy_s / 5, rel=0.2)


def test_the_ledger_knows_what_of_waiting_prompts_is_cached():
    """As it does beside the engine: after every arrival, hits and preemptions included.

    Breaks if the replica does not tell it what the cache has: it would count prompts in full.
    """
    config = small_config(max_num_seqs=8, prefill_chunk_tokens=32, page_size=4)
    replica = _Recording(_deployment(config, num_pages=60, has_ledger=True)).replica
    ledger, scheduler = replica.ledger, replica.scheduler
    assert ledger is not None
    stream = arrivals(_streams(200.0), seed=1, max_model_len=MAX_MODEL_LEN)
    most_saved = 0
    for arrival in (next(stream) for _ in range(150)):
        replica.advance(arrival.request.arrival_s)
        replica.submit(arrival.request, arrival.num_output_tokens, arrival.num_output_tokens)
        uncached = sum(state.num_uncached_tokens for state in scheduler.waiting)
        assert ledger.queued_tokens == uncached
        most_saved = max(
            most_saved, sum(state.prefill_end for state in scheduler.waiting) - uncached
        )
    assert most_saved > 50
    assert scheduler.preemptions_total > 5


def test_a_fleet_runs_the_same_twice_and_spreads_its_load():
    """Breaks if anything but the seed decides, or if the router sends more to some than to others.

    Replicas advance on their own, so the order in which they are looked at must not matter.
    """
    runs = [_fleet_run(num_replicas=4, count=200, rate_per_s=300.0) for _ in range(2)]
    groups = [run.results.group() for run in runs]
    assert groups[0] == groups[1]
    assert groups[0].num_ended == 200
    tokens = runs[0].routed_tokens
    assert max(tokens) / (sum(tokens) / len(tokens)) <= 1.3


def _fleet_run(num_replicas: int, count: int, rate_per_s: float) -> Simulator:
    fleet = Fleet(deployment=_deployment(), num_replicas=num_replicas)
    return simulate(fleet, arrivals(_streams(rate_per_s)[:2], 3, MAX_MODEL_LEN), count)


def test_more_replicas_are_faster():
    """Breaks if replicas share anything: four would be no faster than one in overload."""
    one, four = (_fleet_run(replicas, 200, 600.0).results.group() for replicas in (1, 4))
    assert four.e2e_s[0] < one.e2e_s[0] / 2


def test_what_a_stream_sends_does_not_change_with_what_others_do():
    """Breaks if streams share random numbers: a tenant alone would not be comparable."""
    first, second, _ = _streams(10.0)
    alone = arrivals([first], 7, MAX_MODEL_LEN)
    both = (
        each for each in arrivals([first, second], 7, MAX_MODEL_LEN) if each.request.tenant == "a"
    )
    assert [next(alone) for _ in range(50)] == [next(both) for _ in range(50)]


def test_refused_clients_come_back_when_they_were_told_to():
    """Breaks if a retry comes at another time, or is not counted."""
    config = small_config(max_num_seqs=8, prefill_chunk_tokens=32, page_size=4, max_num_queued=16)
    fleet = Fleet(deployment=_deployment(config, has_ledger=True), clients_return=True)
    simulator = simulate(fleet, arrivals(_streams(700.0)[:1], 5, MAX_MODEL_LEN), 1000)
    results = simulator.results
    assert results.num_refused == results.num_returned > 50
    assert len(results) == 1000 - results.num_refused + results.num_let_in
    assert results.num_let_in >= 0.8 * results.num_returned

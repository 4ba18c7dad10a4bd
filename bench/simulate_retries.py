"""Retries: clients that are refused and come back when they were told to."""

import dataclasses
from collections.abc import Sequence

from ..configs.scheduling_config import SchedulingConfig
from ..engine.simulator import Fleet, Simulator
from .simulate_goodput import LOAD, MIX
from .simulation_report import Check, Report, ms
from .simulation_setup import Engine, PlannedCosts, capacity_per_s, requests

BOUNDS = {
    "64 waiting": SchedulingConfig(max_num_queued=64),
    "20,000 tokens": SchedulingConfig(max_queued_tokens=20_000),
    "2 s of waiting": SchedulingConfig(max_predicted_wait_s=2.0),
}


def retries(costs: PlannedCosts, seeds: Sequence[int], seconds: float) -> Report:
    """Runs overload against each bound on what may wait."""
    engine = Engine(costs=costs, max_num_seqs=min(64, costs.most_rows), prefill_chunk_tokens=512)
    capacity = capacity_per_s(engine, MIX, seeds[0], seconds)
    streams = [
        dataclasses.replace(stream, rate_per_s=LOAD * capacity * stream.rate_per_s)
        for stream in MIX
    ]
    rows: list[list[str]] = []
    shares: list[float] = []
    for name, scheduling in BOUNDS.items():
        for seed in seeds:
            fleet = Fleet(
                deployment=engine.deployment(scheduling, has_ledger=True), clients_return=True
            )
            simulator = Simulator(fleet, requests(streams, seed))
            simulator.run(seconds)
            results = simulator.results
            (replica,) = simulator.replicas
            shares.append(results.num_let_in / max(results.num_returned, 1))
            rows.append(
                [
                    name,
                    str(seed),
                    str(results.num_refused),
                    str(results.num_returned),
                    f"{100 * shares[-1]:.1f}%",
                    f"{replica.busy_s / seconds:.3f}",
                    ms(results.group().queue_s[1]),
                ]
            )
    return Report(
        about=[
            str(costs),
            str(engine),
            f"the mixture of the table goodput at {LOAD:g} times the capacity of {capacity:.1f} "
            f"requests/s for {seconds:g} s; who is refused comes back once, at the time it is told",
        ],
        header=(
            *("bound", "seed", "refused", "came back", "let in", "device busy"),
            "queue p90 ms",
        ),
        rows=rows,
        checks=[Check(name="first retries that are let in, lowest", value=min(shares), low=0.8)],
    )

"""A million requests over many replicas, with a router in front."""

import dataclasses
import resource
import time

from ..configs.scheduling_config import SchedulingConfig
from ..engine.simulated_traffic import Stream
from ..engine.simulation_results import PERCENTILES, Group
from ..engine.simulator import Fleet, simulate
from .simulation_report import Check, Report, ms_each
from .simulation_setup import Engine, PlannedCosts, requests

RATE_PER_REPLICA_S = 8.0
MOST_OVER_MEAN = 1.3

SHARES = {"first": 0.5, "second": 0.3, "third": 0.2}  # of each tenant

CLASSES = (  # on the mean 300 prompt and 150 output tokens
    Stream(
        request_class="chat",
        rate_per_s=0.6,
        prompt_tokens=136,
        num_prefixes=50,
        prefix_tokens=64,
        output_tokens=150,
    ),
    Stream(request_class="retrieval", rate_per_s=0.2, prompt_tokens=800, output_tokens=60),
    Stream(request_class="long output", rate_per_s=0.2, prompt_tokens=100, output_tokens=240),
)


def million(costs: PlannedCosts, seed: int, count: int, num_replicas: int) -> Report:
    """Runs them to their ends; the wall time is a part of the report."""
    engine = Engine(costs=costs, max_num_seqs=32, prefill_chunk_tokens=512)
    rate_per_s = RATE_PER_REPLICA_S * 8.0 / costs.base_ms * num_replicas
    streams = [
        dataclasses.replace(kind, tenant=tenant, rate_per_s=kind.rate_per_s * share * rate_per_s)
        for tenant, share in SHARES.items()
        for kind in CLASSES
    ]
    fleet = Fleet(
        deployment=engine.deployment(SchedulingConfig(max_num_queued=2**20)),
        num_replicas=num_replicas,
    )
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    simulator = simulate(fleet, requests(streams, seed), count)
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    results = simulator.results
    rows = [["all", "all", *_numbers(results.group())]]
    for tenant in SHARES:
        rows.append([tenant, "all", *_numbers(results.group(lambda t, _, s=tenant: t == s))])
    rows += [
        [*key, *_numbers(results.group(lambda t, c, s=key: (t, c) == s))] for key in results.groups
    ]
    steps = sum(replica.num_steps for replica in simulator.replicas)
    jumped = sum(replica.num_jumped_steps for replica in simulator.replicas)
    loads = [replica.output_tokens_total for replica in simulator.replicas]
    mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Report(
        about=[
            str(costs),
            f"{num_replicas} replicas: {engine}; policy fcfs",
            f"{rate_per_s:.0f} requests/s, Poisson; lengths exponential; "
            + "; ".join(
                f"{100 * kind.rate_per_s:.0f} % {kind.request_class} ({kind.prompt_tokens}"
                + (
                    f" and one of {kind.num_prefixes} x {kind.prefix_tokens} shared"
                    if kind.num_prefixes
                    else ""
                )
                + f" prompt, {kind.output_tokens} output tokens)"
                for kind in CLASSES
            ),
            f"{simulator.now_s:.0f} s simulated in {wall_s:.0f} s ({cpu_s:.0f} s of CPU time, "
            f"{1e6 * cpu_s / count:.0f} us a request, one process, {mebibytes:.0f} MiB); "
            f"{steps} steps, {100 * jumped / steps:.0f} % of them in decode-only stretches",
        ],
        header=(
            *("tenant", "class", "requests"),
            *(
                f"{name} p{percent}"
                for name in ("queue", "TTFT", "TPOT", "e2e")
                for percent in PERCENTILES
            ),
            "hits",
        ),
        rows=rows,
        checks=[
            Check(name="requests that ended", value=float(len(results)), low=float(count)),
            Check(
                name="output tokens of the busiest replica over the mean",
                value=max(loads) * num_replicas / sum(loads),
                high=MOST_OVER_MEAN,
            ),
        ],
    )


def _numbers(group: Group) -> list[str]:
    times = [*group.queue_s, *group.ttft_s]
    return [
        str(group.num_ended),
        *ms_each(times),
        *(f"{1e3 * each:.1f}" for each in group.tpot_s),
        *ms_each(group.e2e_s),
        f"{100 * group.hit_rate:.0f}%",
    ]

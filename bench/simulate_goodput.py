"""Goodput: which policy lets the most requests meet their targets when too many come.

And that nobody starves while they come, whom a policy puts last (simulate_starvation).
"""

import dataclasses
from collections.abc import Sequence
from typing import get_args

from ..configs.scheduling_config import PolicyName, SchedulingConfig
from ..engine.simulated_traffic import Stream
from ..engine.simulator import Fleet, Simulator
from .simulate_starvation import starvation
from .simulation_report import Check, Report, ms
from .simulation_setup import Engine, PlannedCosts, capacity_per_s, requests

LOAD = 1.3
WAIT_BOUNDS_S = (4.0, 1.0)
"""What admission alone achieves: who would wait longer is refused at once, whatever the policy."""

MIX = (
    Stream(
        tenant="chats",
        request_class="chat",
        rate_per_s=0.6,
        prompt_tokens=200,
        output_tokens=150,
        priority=2,
        ttft_target_s=1.0,
        tpot_target_s=0.05,
    ),
    Stream(
        tenant="retrieval",
        request_class="retrieval",
        rate_per_s=0.25,
        prompt_tokens=1500,
        output_tokens=60,
        priority=1,
        ttft_target_s=4.0,
        tpot_target_s=0.1,
    ),
    Stream(
        tenant="writers",
        request_class="long output",
        rate_per_s=0.15,
        prompt_tokens=150,
        output_tokens=500,
        priority=0,
        ttft_target_s=10.0,
        tpot_target_s=0.05,
    ),
)


def goodput(costs: PlannedCosts, seeds: Sequence[int], seconds: float) -> Report:
    """Runs the same overload under each policy."""
    engine = Engine(costs=costs, max_num_seqs=min(64, costs.most_rows), prefill_chunk_tokens=512)
    capacity = capacity_per_s(engine, MIX, seeds[0], seconds)
    streams = [
        dataclasses.replace(stream, rate_per_s=LOAD * capacity * stream.rate_per_s)
        for stream in MIX
    ]
    policies = get_args(PolicyName)
    rows: list[list[str]] = []
    bounded: list[str] = []
    for wait_s in WAIT_BOUNDS_S:
        both = [
            _run(engine, policy, streams, seeds[0], seconds, max_predicted_wait_s=wait_s)
            for policy in ("fcfs", "deadline")
        ]
        fcfs, deadline = (each.results.group().goodput / seconds for each in both)
        bounded.append(
            f"for comparison, with max_predicted_wait_s at {wait_s:g} (seed {seeds[0]}): fcfs "
            f"{fcfs:.2f} good/s, deadline {deadline:.2f}, {deadline / max(fcfs, 1e-9):.2f} times"
        )
    goodputs: dict[tuple[str, int], float] = {}
    for seed in seeds:
        for policy in policies:
            results = _run(engine, policy, streams, seed, seconds).results
            everyone = results.group(to_s=seconds)
            goodputs[policy, seed] = everyone.goodput / seconds
            row = [str(seed), policy, f"{everyone.goodput / seconds:.2f}"]
            row.append(f"{goodputs[policy, seed] / max(goodputs['fcfs', seed], 1e-9):.2f}")
            for stream in streams:
                group = results.group(lambda _, name, s=stream: name == s.request_class)
                row.append(f"{100 * group.goodput / max(group.num_ended, 1):.0f}%")
                row.append(ms(group.ttft_s[1]))
            row += [str(results.num_refused), f"{everyone.longest_queue_s:.1f}"]
            rows.append(row)
    about = [
        str(costs),
        str(engine),
        f"capacity {capacity:.1f} requests/s of the mixture (first come, first served); {LOAD:g} "
        f"times as many come for {seconds:g} s; at most {SchedulingConfig().max_num_queued} wait",
    ]
    about += [
        f"{stream.request_class}: {stream.rate_per_s:.2f}/s, {stream.prompt_tokens} prompt and "
        f"{stream.output_tokens} output tokens, exponential; first token within "
        f"{stream.ttft_target_s:g} s, {1e3 * (stream.tpot_target_s or 0):g} ms a further token; "
        f"priority {stream.priority}"
        for stream in streams
    ]
    about += bounded
    about_waits, waits = starvation(costs, seeds)
    about += about_waits
    columns = [
        f"{stream.request_class} {what}" for stream in streams for what in ("good", "TTFT p90 ms")
    ]
    gains = [goodputs["deadline", seed] / max(goodputs["fcfs", seed], 1e-9) for seed in seeds]
    return Report(
        about=about,
        header=(
            *("seed", "policy", "good/s", "/ fcfs", *columns),
            *("refused", "longest wait s"),
        ),
        rows=rows,
        checks=[
            Check(name="goodput of deadline over fcfs, lowest", value=min(gains), low=1.2),
            *waits,
        ],
    )


def _run(
    engine: Engine,
    policy: PolicyName,
    streams: Sequence[Stream],
    seed: int,
    seconds: float,
    *,
    max_predicted_wait_s: float | None = None,
) -> Simulator:
    scheduling = SchedulingConfig(policy=policy, max_predicted_wait_s=max_predicted_wait_s)
    deployment = engine.deployment(scheduling, has_ledger=True)
    simulator = Simulator(Fleet(deployment=deployment), requests(streams, seed))
    simulator.run(seconds)
    simulator.finish()
    return simulator

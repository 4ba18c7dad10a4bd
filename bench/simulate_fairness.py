"""Fairness: a tenant that asks for its half, and one beside it that asks for ten times as much."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..configs.scheduling_config import PolicyName, SchedulingConfig
from ..engine.simulated_traffic import Stream
from ..engine.simulator import Fleet, Simulator
from .simulation_report import Check, Report, ms
from .simulation_setup import WARM_UP_S, Engine, PlannedCosts, capacity_per_s, requests

FLOOD = 10.0
UNLIMITED = SchedulingConfig(max_num_queued=2**20).max_num_queued


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How the victim asks.

    Attributes:
      name: For the table.
      share: Of the half that is its own.
      is_steady: In equal distances, with lengths around the mean; else at random, with long tails.
      is_promised: The promises are about this one; others are shown for comparison.
    """

    name: str
    share: float
    is_steady: bool
    is_promised: bool


SCENARIOS = (
    Scenario(name="steady", share=0.97, is_steady=True, is_promised=True),
    Scenario(name="random", share=0.85, is_steady=False, is_promised=False),
)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What one run brought after the first ten seconds."""

    victim_tokens: int
    other_tokens: int
    seconds: float
    victim_ttft_s: tuple[float, ...]
    victim_queue_p99_s: float

    @property
    def tokens_per_s(self) -> float:
        return (self.victim_tokens + self.other_tokens) / self.seconds

    @property
    def ratio(self) -> float:
        """Of the victim's service to the other's."""
        return self.victim_tokens / max(self.other_tokens, 1)


def fairness(costs: PlannedCosts, seeds: Sequence[int], seconds: float) -> Report:
    """Runs the victim alone, and beside the flood under both policies."""
    engine = Engine(costs=costs, max_num_seqs=min(128, costs.most_rows), prefill_chunk_tokens=256)
    rows: list[list[str]] = []
    about = [str(costs), str(engine)]
    ratios: list[float] = []
    slowdowns: list[float] = []
    throughputs: list[float] = []
    for scenario in SCENARIOS:
        mix = _stream("victim", 1.0, scenario)
        capacity = capacity_per_s(engine, [mix], seeds[0], seconds)
        rate_per_s = scenario.share * capacity / 2
        about.append(
            f"{scenario.name}: the engine serves {capacity:.1f} requests/s of {mix.prompt_tokens} "
            f"prompt and {mix.output_tokens} output tokens; the victim sends {rate_per_s:.2f}/s "
            f"({scenario.share:g} of its half), the flooder {FLOOD * rate_per_s:.1f}/s, weights "
            f"1:1; {seconds:g} s after {WARM_UP_S:g}"
        )
        for seed in seeds:
            solo = _run(engine, "fcfs", [_stream("victim", rate_per_s, scenario)], seed, seconds)
            both = [
                _stream("victim", rate_per_s, scenario),
                _stream("flooder", FLOOD * rate_per_s, scenario),
            ]
            fcfs, fair = (_run(engine, name, both, seed, seconds) for name in ("fcfs", "fair"))
            slowdown = fair.victim_ttft_s[2] / solo.victim_ttft_s[2]
            throughput = fair.tokens_per_s / fcfs.tokens_per_s
            if scenario.is_promised:
                ratios.append(fair.ratio)
                slowdowns.append(slowdown)
                throughputs.append(throughput)
            for name, run in (("alone", solo), ("fcfs", fcfs), ("fair", fair)):
                is_fair = name == "fair"
                rows.append(
                    [
                        scenario.name,
                        str(seed),
                        name,
                        f"{run.victim_tokens / run.seconds:.0f}",
                        f"{run.tokens_per_s:.0f}",
                        f"{run.ratio:.3f}" if run.other_tokens else "",
                        ms(run.victim_ttft_s[0]),
                        ms(run.victim_ttft_s[2]),
                        ms(run.victim_queue_p99_s),
                        f"{slowdown:.2f}" if is_fair else "",
                        f"{throughput:.3f}" if is_fair else "",
                    ]
                )
    return Report(
        about=about,
        header=(
            *("victim", "seed", "policy", "its tok/s", "all tok/s", "ratio", "TTFT p50 ms"),
            *("p99 ms", "queue p99 ms", "p99 / alone", "tok/s / fcfs"),
        ),
        rows=rows,
        checks=[
            Check(name="service of victim to flooder, lowest", value=min(ratios), low=0.9),
            Check(name="service of victim to flooder, highest", value=max(ratios), high=1.1),
            Check(name="victim's TTFT p99 over that alone", value=max(slowdowns), high=1.5),
            Check(name="throughput over fcfs", value=min(throughputs), low=0.97),
        ],
    )


def _stream(tenant: str, rate_per_s: float, scenario: Scenario) -> Stream:
    return Stream(
        tenant=tenant,
        rate_per_s=rate_per_s,
        is_even=scenario.is_steady and tenant == "victim",
        has_tail=not scenario.is_steady,
    )


def _run(
    engine: Engine, policy: PolicyName, streams: Sequence[Stream], seed: int, seconds: float
) -> _Run:
    scheduling = SchedulingConfig(policy=policy, max_num_queued=UNLIMITED)
    simulator = Simulator(Fleet(deployment=engine.deployment(scheduling)), requests(streams, seed))
    (replica,) = simulator.replicas
    simulator.run(WARM_UP_S)
    before = dict(replica.served)
    simulator.run(WARM_UP_S + seconds)
    served = {name: tokens - before.get(name, 0) for name, tokens in replica.served.items()}
    group = simulator.results.group(lambda tenant, _: tenant == "victim", from_s=WARM_UP_S)
    return _Run(
        victim_tokens=served["victim"],
        other_tokens=served.get("flooder", 0),
        seconds=seconds,
        victim_ttft_s=group.ttft_s,
        victim_queue_p99_s=group.queue_s[2],
    )

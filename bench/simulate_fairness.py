"""Fairness: a tenant that asks for its half, and one beside it that asks for ten times as much."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..configs.scheduling_config import PolicyName, SchedulingConfig
from ..engine.simulated_traffic import Stream
from ..engine.simulator import Fleet, Simulator
from .simulation_report import Check, Report, ms
from .simulation_setup import WARM_UP_S, Engine, PlannedCosts, capacity_per_s, requests

SIZES = (8, 32, 64, 128)
"""Slots. The promises hold at each; scenarios that are shown for comparison run at the largest.

A smaller engine runs longer before anything counts, until as many of the victim's requests came.
Counters are equal at the beginning, and of few requests some are long by chance: for a while the
victim asks for more than its half, and rightly waits.
"""

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
    """What one run brought once it had gone on for a while."""

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


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """The victim alone, and beside the flood under both policies."""

    alone: _Run
    fcfs: _Run
    fair: _Run

    @property
    def slowdown(self) -> float:
        """Of the victim's TTFT p99."""
        return self.fair.victim_ttft_s[2] / self.alone.victim_ttft_s[2]

    @property
    def throughput(self) -> float:
        """Over that of first come, first served."""
        return self.fair.tokens_per_s / self.fcfs.tokens_per_s

    def rows(self, *names: str) -> list[list[str]]:
        """Three rows of the table, after the columns that say what was compared."""
        return [
            [
                *names,
                name,
                f"{run.victim_tokens / run.seconds:.0f}",
                f"{run.tokens_per_s:.0f}",
                f"{run.ratio:.3f}" if run.other_tokens else "",
                ms(run.victim_ttft_s[0]),
                ms(run.victim_ttft_s[2]),
                ms(run.victim_queue_p99_s),
                f"{self.slowdown:.2f}" if run is self.fair else "",
                f"{self.throughput:.3f}" if run is self.fair else "",
            ]
            for name, run in (("alone", self.alone), ("fcfs", self.fcfs), ("fair", self.fair))
        ]


def fairness(costs: PlannedCosts, seeds: Sequence[int], seconds: float) -> Report:
    """Compares at several sizes of the engine what is promised, and at the largest the rest."""
    *smaller, largest = sorted({min(size, costs.most_rows) for size in SIZES})
    about = [str(costs)]
    rows: list[list[str]] = []
    checks: list[Check] = []
    requests_before = 0.0  # of the victim, in the first and largest, before anything counts
    for size, scenario in [
        *((largest, scenario) for scenario in SCENARIOS),
        *((size, scenario) for size in smaller for scenario in SCENARIOS if scenario.is_promised),
    ]:
        engine = Engine(costs=costs, max_num_seqs=size, prefill_chunk_tokens=256)
        mix = _stream("victim", 1.0, scenario)
        capacity = capacity_per_s(engine, [mix], seeds[0], seconds)
        rate_per_s = scenario.share * capacity / 2
        requests_before = requests_before or WARM_UP_S * rate_per_s
        is_largest = size == largest
        from_s = WARM_UP_S if is_largest else requests_before / rate_per_s
        for_s = seconds if is_largest else seconds / 2
        about.append(
            f"{scenario.name}, {engine}: serves {capacity:.1f} requests/s of {mix.prompt_tokens} "
            f"prompt and {mix.output_tokens} output tokens; the victim sends {rate_per_s:.2f}/s "
            f"({scenario.share:g} of its half), the flooder {FLOOD * rate_per_s:.1f}/s, weights "
            f"1:1; {for_s:g} s after {from_s:.0f}"
        )
        compared = [_compare(engine, scenario, rate_per_s, seed, from_s, for_s) for seed in seeds]
        for seed, each in zip(seeds, compared, strict=True):
            rows += each.rows(str(size), scenario.name, str(seed))
        if scenario.is_promised:
            checks += _checks(compared, "" if is_largest else f" at {size} slots")
    return Report(
        about=about,
        header=(
            *("slots", "victim", "seed", "policy", "its tok/s", "all tok/s", "ratio"),
            *("TTFT p50 ms", "p99 ms", "queue p99 ms", "p99 / alone", "tok/s / fcfs"),
        ),
        rows=rows,
        checks=checks,
    )


def _compare(
    engine: Engine, scenario: Scenario, rate_per_s: float, seed: int, from_s: float, seconds: float
) -> _Comparison:
    victim = _stream("victim", rate_per_s, scenario)
    both = [victim, _stream("flooder", FLOOD * rate_per_s, scenario)]

    def run(policy: PolicyName, streams: Sequence[Stream]) -> _Run:
        return _run(engine, policy, streams, seed, from_s, seconds)

    return _Comparison(alone=run("fcfs", [victim]), fcfs=run("fcfs", both), fair=run("fair", both))


def _checks(compared: Sequence[_Comparison], where: str) -> list[Check]:
    """What is promised, of the worst of all seeds."""
    ratios = [each.fair.ratio for each in compared]
    slowdown = max(each.slowdown for each in compared)
    throughput = min(each.throughput for each in compared)
    return [
        Check(name=f"service of victim to flooder{where}, lowest", value=min(ratios), low=0.9),
        Check(name=f"service of victim to flooder{where}, highest", value=max(ratios), high=1.1),
        Check(name=f"victim's TTFT p99 over that alone{where}", value=slowdown, high=1.5),
        Check(name=f"throughput over fcfs{where}", value=throughput, low=0.97),
    ]


def _stream(tenant: str, rate_per_s: float, scenario: Scenario) -> Stream:
    return Stream(
        tenant=tenant,
        rate_per_s=rate_per_s,
        is_even=scenario.is_steady and tenant == "victim",
        has_tail=not scenario.is_steady,
    )


def _run(
    engine: Engine,
    policy: PolicyName,
    streams: Sequence[Stream],
    seed: int,
    from_s: float,
    seconds: float,
) -> _Run:
    scheduling = SchedulingConfig(policy=policy, max_num_queued=UNLIMITED)
    simulator = Simulator(Fleet(deployment=engine.deployment(scheduling)), requests(streams, seed))
    (replica,) = simulator.replicas
    simulator.run(from_s)
    before = dict(replica.served)
    simulator.run(from_s + seconds)
    served = {name: tokens - before.get(name, 0) for name, tokens in replica.served.items()}
    group = simulator.results.group(lambda tenant, _: tenant == "victim", from_s=from_s)
    return _Run(
        victim_tokens=served["victim"],
        other_tokens=served.get("flooder", 0),
        seconds=seconds,
        victim_ttft_s=group.ttft_s,
        victim_queue_p99_s=group.queue_s[2],
    )

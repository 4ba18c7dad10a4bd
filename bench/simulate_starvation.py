"""Starvation: whether those whom a policy puts last end in bounded time while overload lasts."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from ..configs.scheduling_config import PolicyName, SchedulingConfig
from ..engine.policy_deadline import LATE_TARGETS
from ..engine.refusals import Overloaded
from ..engine.request import FinishReason
from ..engine.schedule import RequestState
from ..engine.simulated_replica import SimulatedReplica
from ..engine.simulated_traffic import Stream
from .simulation_report import Check
from .simulation_setup import Engine, PlannedCosts, capacity_per_s, requests

SLOTS = 8
MAX_QUEUED = 8 * SLOTS
LOAD = 1.5
SHARE = 0.05  # of the capacity, which the patient ask for
BOUNDS_PER_RUN = 8  # a run lasts so many times as long as anybody may wait
LONGEST_OVER_MEAN = 1.5  # lengths without a tail

FLOODER = Stream(tenant="flooder", prompt_tokens=128, output_tokens=64, has_tail=False, priority=1)
PATIENT = dataclasses.replace(FLOODER, tenant="patient", is_even=True, priority=0)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A flood that every policy but fair puts first, and requests that it puts last.

    All times are multiples of a turn, in which all slots come free once; so they mean the same
    whatever steps cost. Clients of the flood have no patience beyond a few turns, so the queue does
    not fill with them: there is room for newcomers at all times, and they never stop.

    Attributes:
      engine: What serves them.
      capacity_per_s: Requests that it serves in a second.
    """

    engine: Engine
    capacity_per_s: float

    @property
    def turn_s(self) -> float:
        """How long a request holds its slot, on the mean."""
        return self.engine.max_num_seqs / self.capacity_per_s

    @property
    def patience_s(self) -> float:
        """After so long without a slot those of the flood give up."""
        return 3 * self.turn_s

    @property
    def streams(self) -> list[Stream]:
        """The flood's, which are due before those of the patient that came with them, and those."""
        return [
            dataclasses.replace(
                FLOODER,
                rate_per_s=LOAD * self.capacity_per_s,
                ttft_target_s=self.turn_s / 2,
                queue_ttl_s=self.patience_s,
            ),
            dataclasses.replace(PATIENT, rate_per_s=SHARE * self.capacity_per_s),
        ]

    def scheduling(self, policy: PolicyName) -> SchedulingConfig:
        """Ageing and targets of some turns, so that a run is many times as long."""
        return SchedulingConfig(
            policy=policy,
            max_num_queued=MAX_QUEUED,
            priority_ageing_s=8 * self.turn_s,
            default_ttft_target_s=self.turn_s,
        )

    def bound_s(self, policy: PolicyName) -> float:
        """What the policy promises: no patient request lives longer.

        From some time on nobody who comes passes it any more: at once under fcfs, after the range
        of priorities times the ageing, or when it is due as a late one. Then it waits for what is
        there, at most a full queue and full slots; and has its turn. Under fair its tenant, which
        asks for less than its share, waits as if it had one of two engines of half the speed.
        """
        scheduling = self.scheduling(policy)
        queue_s = MAX_QUEUED / self.capacity_per_s
        turns_s = (1 + LONGEST_OVER_MEAN) * self.turn_s
        return (
            turns_s
            + {
                "fcfs": queue_s,
                "priority": queue_s + scheduling.priority_ageing_s * FLOODER.priority,
                "fair": self.turn_s,
                "deadline": queue_s + (1 + LATE_TARGETS) * scheduling.default_ttft_target_s,
            }[policy]
        )

    def longest_s(self, policy: PolicyName, seed: int) -> float:
        """Until the end of a request, or of the run, in which the flood does not pause.

        To the end, since a slot that is lost again is worth nothing. From the arrival on for the
        patient; for the flood, which gives up by itself, from its first slot on. NaN, which holds
        under no bound, if nobody patient came.
        """
        lives_s: dict[str, list[float]] = {PATIENT.tenant: [], FLOODER.tenant: []}

        def on_end(state: RequestState, reason: FinishReason, now_s: float) -> None:
            tenant = state.request.tenant
            began_s = state.request.arrival_s if tenant == PATIENT.tenant else state.admitted_s
            if began_s is not None:
                lives_s[tenant].append(now_s - began_s)

        until_s = BOUNDS_PER_RUN * self.bound_s(policy)
        deployment = self.engine.deployment(self.scheduling(policy), has_ledger=True)
        replica = SimulatedReplica(deployment, on_end)
        for request, num_outputs in requests(self.streams, seed):
            replica.advance(min(request.arrival_s, until_s))
            if request.arrival_s >= until_s:
                break
            with contextlib.suppress(Overloaded):  # whoever starves fills the queue
                replica.submit(request, num_outputs, num_outputs)
        for state in (*replica.scheduler.waiting, *replica.scheduler.running):
            on_end(state, FinishReason.CANCELLED, until_s)
        if not lives_s[PATIENT.tenant]:
            return math.nan
        return max(itertools.chain(*lives_s.values()))


def scenario(costs: PlannedCosts, seed: int) -> Scenario:
    """For a small engine of these costs."""
    engine = Engine(costs=costs, max_num_seqs=SLOTS, prefill_chunk_tokens=512)
    turns_s = 100 * FLOODER.output_tokens * costs.base_ms * 1e-3
    capacity = capacity_per_s(engine, [FLOODER], seed, turns_s)
    return Scenario(engine=engine, capacity_per_s=capacity)


def starvation(costs: PlannedCosts, seeds: Sequence[int]) -> tuple[list[str], list[Check]]:
    """What is simulated, and that nobody starves under any policy."""
    chosen = scenario(costs, seeds[0])
    policies = get_args(PolicyName)
    runs_s = [BOUNDS_PER_RUN * chosen.bound_s(policy) for policy in policies]
    flood, patient = chosen.streams
    about = [
        f"longest wait: {chosen.engine}; {chosen.capacity_per_s:.1f} requests/s of "
        f"{FLOODER.prompt_tokens} prompt and {FLOODER.output_tokens} output tokens; a flood of "
        f"{flood.rate_per_s:.1f}/s, before which {patient.rate_per_s:.2f}/s of lower priority and "
        f"later deadline are patient; {min(runs_s):.0f} to {max(runs_s):.0f} s, as the policy "
        f"bounds it, {BOUNDS_PER_RUN} times the bound"
    ]
    checks = [
        Check(
            name=f"longest wait to the end (s) under {policy}",
            value=max(chosen.longest_s(policy, seed) for seed in seeds),
            high=chosen.bound_s(policy),
        )
        for policy in policies
    ]
    return about, checks

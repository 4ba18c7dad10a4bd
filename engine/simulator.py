"""Simulator: replicas, a router in front of them, and clients that come back. No JAX, no clock.

Each replica runs up to a time only when something reaches it, a request or the question how busy
it is; in between it is on its own, so the order in which replicas are run changes nothing.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from .refusals import Overloaded
from .router import ReplicaReport, RoutedRequest, choose
from .router_memory import RouterMemory
from .simulated_replica import Deployment, SimulatedReplica
from .simulated_traffic import Arrival
from .simulation_results import SimulationResults
from .token_chain import TokenChain, root_key


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What is simulated.

    Attributes:
      deployment: Of each replica.
      num_replicas: How many there are.
      report_every_s: How often a replica says how busy it is.
      max_routed_pages: Pages of a prompt that the router looks at.
      clients_return: Those that are refused come back once, when they are told to.
      max_output_tokens: What clients ask for at most; outputs mostly end earlier, by a stop id.
        None: exactly what comes.
    """

    deployment: Deployment
    num_replicas: int = 1
    report_every_s: float = 0.25
    max_routed_pages: int = 64
    clients_return: bool = False
    max_output_tokens: int | None = None


class Simulator:
    """Runs a fleet on requests.

    Attributes:
      replicas: They.
      results: What became of those that ended.
      memory: The router's.
      routed_tokens: (Uncached as the router believes, and output) tokens given to each replica.
      now_s: Up to where it has run.
    """

    def __init__(self, fleet: Fleet, requests: Iterator[Arrival]) -> None:
        """At time 0; requests in the order of their arrival, be there an end or not."""
        self.results = SimulationResults()
        self.replicas = [
            SimulatedReplica(fleet.deployment, self.results.add) for _ in range(fleet.num_replicas)
        ]
        self.memory = RouterMemory(fleet.num_replicas * fleet.deployment.num_pages)
        self.routed_tokens = [0] * fleet.num_replicas
        self.now_s = 0.0
        self._fleet = fleet
        self._requests = requests
        self._next = next(requests, None)
        self._returns: list[tuple[float, int, Arrival]] = []
        self._num_returns = 0
        self._names = [f"{index:04}" for index in range(fleet.num_replicas)]
        self._reports: list[ReplicaReport] = []
        self._report_s = 0.0

    def run(self, until_s: float) -> None:
        """Takes what arrives before `until_s`, and runs all replicas up to it."""
        while True:
            fresh_s = math.inf if self._next is None else self._next.request.arrival_s
            if self._returns and self._returns[0][0] < min(fresh_s, until_s):
                at_s, _, arrival = heapq.heappop(self._returns)
                self._return(arrival, at_s)
            elif self._next is not None and fresh_s < until_s:
                arrival, self._next = self._next, next(self._requests, None)
                self._arrive(arrival)
            else:
                break
        for replica in self.replicas:
            replica.advance(until_s)
        self.now_s = until_s

    def run_requests(self, count: int) -> None:
        """Takes so many fresh requests, and runs until everybody has ended."""
        for _ in range(count):
            if self._next is None:
                break
            arrival, self._next = self._next, next(self._requests, None)
            while self._returns and self._returns[0][0] < arrival.request.arrival_s:
                at_s, _, again = heapq.heappop(self._returns)
                self._return(again, at_s)
            self._arrive(arrival)
        self.finish()

    def finish(self) -> None:
        """Runs until everybody has ended who has come so far, those who come back included."""
        while self._returns:
            at_s, _, again = heapq.heappop(self._returns)
            self._return(again, at_s)
        for replica in self.replicas:
            replica.advance(math.inf)
            self.now_s = max(self.now_s, replica.now_s)

    def _arrive(self, arrival: Arrival) -> None:
        refusal = self._submit(arrival)
        if refusal is None:
            return
        self.results.num_refused += 1
        if self._fleet.clients_return:
            at_s = arrival.request.arrival_s + refusal.retry_after_s
            heapq.heappush(self._returns, (at_s, self._num_returns, arrival))
            self._num_returns += 1

    def _return(self, arrival: Arrival, at_s: float) -> None:
        request = dataclasses.replace(arrival.request, arrival_s=at_s)
        refusal = self._submit(arrival._replace(request=request))
        self.results.num_returned += 1
        self.results.num_let_in += refusal is None

    def _submit(self, arrival: Arrival) -> Overloaded | None:
        request, num_outputs = arrival
        at_s = request.arrival_s
        index = self._route(arrival, at_s) if len(self.replicas) > 1 else 0
        replica = self.replicas[index]
        replica.advance(at_s)
        most = self._fleet.max_output_tokens or num_outputs
        try:
            replica.submit(request, num_outputs, max(most, num_outputs))
        except Overloaded as refusal:
            return refusal
        return None

    def _route(self, arrival: Arrival, at_s: float) -> int:
        while self._report_s <= at_s:
            self._report()
            self._report_s += self._fleet.report_every_s
        request, config = arrival.request, self._fleet.deployment.config
        prompt = request.prompt_token_ids
        num_pages = 0
        if config.scheduling.prefix_cache:
            num_pages = min((len(prompt) - 1) // config.page_size, self._fleet.max_routed_pages)
        chain = TokenChain(
            root_key(tenant=request.tenant, salt=request.cache_salt),
            config.page_size,
            prompt[: num_pages * config.page_size],
        )
        routed = RoutedRequest(
            num_prompt_tokens=len(prompt),
            num_output_tokens=arrival.num_output_tokens,
            keys=[chain.key(page) for page in range(num_pages)],
            page_size=config.page_size,
        )
        choice = choose(routed, self._reports, self.memory, at_s)
        assert choice is not None, "a replica of a simulation always serves"
        self.memory.sent(
            choice.name,
            routed.keys,
            prompt_tokens=len(prompt) - choice.num_cached_tokens,
            num_tokens=choice.num_tokens,
            now_s=at_s,
        )
        index = int(choice.name)
        self.routed_tokens[index] += choice.num_tokens
        return index

    def _report(self) -> None:
        at_s = self._report_s
        self._reports.clear()
        for name, replica in zip(self._names, self.replicas, strict=True):
            replica.advance(at_s)
            self._reports.append(
                ReplicaReport(
                    name=name,
                    at_s=at_s,
                    is_serving=True,
                    wait_s=replica.predicted_wait_s(at_s),
                    tokens_per_s=self._fleet.deployment.costs.prefill_tokens_per_s,
                )
            )
            self.memory.reported(name, at_s)


def simulate(fleet: Fleet, requests: Iterator[Arrival], count: int) -> Simulator:
    """Runs so many requests to their ends."""
    simulator = Simulator(fleet, requests)
    simulator.run_requests(count)
    return simulator

"""`python -m octavo.bench.retries`: whether a refused client that obeys gets in when it returns.

Starts a server with a small queue, measures in a closed loop how many requests a second it serves,
and offers a multiple of that, at random times. In a first run refused clients wait exactly as long
as they were told; in a second one they try again at once, which shows what the wait is worth.
"""

import asyncio
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from absl import flags

from ..server import octavo_pb2 as pb
from ..server import octavo_pb2_grpc
from ..server.command_line import Command, CommandError
from ..server.table import format_table
from .closed_loop import BenchmarkFailed, Clock, run_closed_loop
from .entry_point import main
from .load_flags import define_server_flags, define_workload_flags, server_command
from .open_loop import run_open_loop
from .retry_summary import RetrySummary, summarize_retries
from .server_process import server_process
from .workload import Mode, Workload, random_prompts, request

CAPACITY_ROUNDS = 5  # requests of each client in the closed loop, on the mean


@dataclass(frozen=True, kw_only=True)
class RetryOptions:
    """How much of what.

    Attributes:
      workload: What requests look like; output_tokens is the mean of lengths that are drawn evenly
        from half to one and a half of it.
      overload: Requests offered, as a multiple of those that the server serves.
      requests: Clients in each run.
      max_num_seqs: Requests that the server runs at once.
      max_num_queued: Requests that it lets wait.
    """

    workload: Workload
    overload: float = 1.5
    requests: int = 200
    max_num_seqs: int = 8
    max_num_queued: int = 8

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and the bound."""
        if not 0.1 <= self.overload <= 100:
            raise ValueError(f"overload is {self.overload}; it must be in [0.1, 100]")
        for name, low, high in (
            ("requests", 2, 100_000),
            ("max_num_seqs", 1, 4096),
            ("max_num_queued", 0, 4096),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be in [{low}, {high}]")

    @property
    def num_places(self) -> int:
        """Requests that may be there at once."""
        return self.max_num_seqs + self.max_num_queued


@dataclass(frozen=True, kw_only=True)
class RetryResults:
    """All that was measured.

    Attributes:
      capacity_per_s: Requests a second in the closed loop.
      offered_per_s: Requests a second offered in both runs.
      obeying: Of the run in which clients wait as they are told.
      at_once: Of the run in which they do not.
    """

    capacity_per_s: float
    offered_per_s: float
    obeying: RetrySummary
    at_once: RetrySummary


async def measure_retries(
    stub: octavo_pb2_grpc.InferenceStub, options: RetryOptions, vocab_size: int, clock: Clock
) -> RetryResults:
    """The closed loop and both runs, on a server without other clients.

    Raises:
      BenchmarkFailed: A request failed.
    """
    requests = _requests(options.workload, vocab_size)
    capacity_per_s = await _capacity_per_s(stub, options, requests, clock)
    offered_per_s = options.overload * capacity_per_s
    summaries = []
    for obeys in (True, False):
        draw = random.Random(f"arrivals {options.workload.seed}")
        arrivals_s: list[float] = []
        now_s = 0.0
        for _ in range(options.requests):
            arrivals_s.append(now_s)
            now_s += draw.expovariate(offered_per_s)
        batch = [next(requests) for _ in arrivals_s]
        visits = await run_open_loop(stub, batch, arrivals_s, clock, obeys=obeys)
        summaries.append(summarize_retries(visits, options.num_places))
    return RetryResults(
        capacity_per_s=capacity_per_s,
        offered_per_s=offered_per_s,
        obeying=summaries[0],
        at_once=summaries[1],
    )


def _requests(workload: Workload, vocab_size: int) -> Iterator[pb.GenerateRequest]:
    """Greedy requests without end, no two alike."""
    draw = random.Random(f"lengths {workload.seed}")
    mean = workload.output_tokens
    for prompt in random_prompts(workload, vocab_size):
        one = request(workload, Mode.GREEDY, prompt, 0)
        one.sampling.max_tokens = draw.randint((mean + 1) // 2, mean + mean // 2)
        yield one


async def _capacity_per_s(
    stub: octavo_pb2_grpc.InferenceStub,
    options: RetryOptions,
    requests: Iterator[pb.GenerateRequest],
    clock: Clock,
) -> float:
    """Requests a second while all slots are taken and as many wait as may, up to twice the slots.

    From the first end on, up to the one after which fewer clients than slots are left.
    """
    slots = options.max_num_seqs
    concurrency = slots + min(slots, options.max_num_queued)
    batch = [next(requests) for _ in range(CAPACITY_ROUNDS * concurrency)]
    traces = await run_closed_loop(stub, batch, concurrency, clock)
    ends_s = sorted(trace.deltas[-1][0] for trace in traces)
    last = len(ends_s) - slots
    return last / (ends_s[last] - ends_s[0])


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    define_server_flags(values)
    define_workload_flags(
        values, "Tokens of outputs on the mean; from half to one and a half of it."
    )
    options = RetryOptions(workload=Workload())
    flags.DEFINE_float(
        "overload",
        options.overload,
        "Requests offered, as a multiple of what the server serves.",
        flag_values=values,
    )
    flags.DEFINE_integer("requests", options.requests, "Clients in each run.", flag_values=values)
    flags.DEFINE_integer(
        "max_num_seqs",
        options.max_num_seqs,
        "Requests that the server runs at once.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "max_num_queued",
        options.max_num_queued,
        "Requests that it lets wait for a slot.",
        flag_values=values,
    )


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Measures and prints."""
    options = RetryOptions(
        workload=Workload(
            prompt_tokens=values.prompt_tokens,
            output_tokens=values.output_tokens,
            seed=values.seed,
        ),
        overload=values.overload,
        requests=values.requests,
        max_num_seqs=values.max_num_seqs,
        max_num_queued=values.max_num_queued,
    )
    asyncio.run(_run(values, options))
    return 0


async def _run(values: flags.FlagValues, options: RetryOptions) -> None:
    sizes = [f"--{name}={getattr(options, name)}" for name in ("max_num_seqs", "max_num_queued")]
    async with (
        server_process([*server_command(values), *sizes], values.start_timeout_s) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        control = octavo_pb2_grpc.ControlStub(channel)
        model = await control.GetModelInfo(pb.GetModelInfoRequest())
        try:
            results = await measure_retries(
                octavo_pb2_grpc.InferenceStub(channel), options, model.vocab_size, time.monotonic
            )
        except BenchmarkFailed as error:
            raise CommandError(str(error)) from error
    print(
        json.dumps(as_json(model, options, results))
        if values.json
        else as_text(model, options, results)
    )


def as_json(
    model: pb.GetModelInfoResponse, options: RetryOptions, results: RetryResults
) -> dict[str, Any]:
    """Everything that was measured, and of what."""
    return {
        "model": {name: getattr(model, name) for name in ("name", "dtype", "device")},
        "options": dataclasses.asdict(options),
        **dataclasses.asdict(results),
    }


def as_text(model: pb.GetModelInfoResponse, options: RetryOptions, results: RetryResults) -> str:
    """A table, and above it what was measured."""
    workload = options.workload
    header = (
        *("retry", "sent", "refused", "let in", "share", "served/s"),
        *("promised s, p50", "p90", "needed s, p50", "p90"),
    )
    rows = [
        (
            name,
            str(one.sent),
            str(one.refused),
            str(one.let_in_at_retry),
            _number(one.share, 3),
            _number(one.served_per_s, 2),
            *(
                _number(seconds, 2)
                for seconds in (
                    *(one.promised_p50_s, one.promised_p90_s),
                    *(one.needed_p50_s, one.needed_p90_s),
                )
            ),
        )
        for name, one in (("as told", results.obeying), ("at once", results.at_once))
    ]
    return (
        f"octavo, {model.name}, {model.dtype} on {model.device}: {options.max_num_seqs} slots and "
        f"{options.max_num_queued} places in the queue, {workload.prompt_tokens} prompt and about "
        f"{workload.output_tokens} output tokens; serves {results.capacity_per_s:.2f} requests/s "
        f"in a closed loop, {results.offered_per_s:.2f} offered\n{format_table(header, rows)}"
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


COMMAND = Command(
    program="python -m",
    name="octavo.bench.retries",
    summary="Measures how many refused clients get in at the time they were told to come back.",
    define_flags=define_flags,
    run=run,
)


if __name__ == "__main__":
    sys.exit(main(COMMAND))

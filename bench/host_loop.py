"""`python -m octavo.bench.host_loop`: what a step costs on the host, beside a device that is free.

The engine is the real one, its device takes no time (bench.null_device). After every request has
decoded for a while, each step is a decode row for each of them: schedule, pack, dispatch, read,
hand over. With --num_waiting a queue waits for slots that none of them gives up, and the policy
looks at it in each step. Beside it stands what the front end does with each token: merging,
detokenizing, making and encoding the message.
"""

import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

import grpc
from absl import flags

from ..configs.engine_config import EngineConfig
from ..configs.presets import DEFAULT_PRESET
from ..configs.scheduling_config import PolicyName, SchedulingConfig
from ..engine.admission import EngineLimits, admit
from ..engine.engine import Engine
from ..engine.request import Request, RequestOutput
from ..engine.sampling_params import SamplingParams
from ..engine.step_costs import StepCosts
from ..engine.step_shapes import StepShapes
from ..models.fetch import default_cache_dir, fetch
from ..models.tokenizer import load_tokenizer
from ..server import octavo_pb2 as pb
from ..server.choice_output import ChoiceOutput
from ..server.command_line import Command, UsageError
from ..server.model_codec import ModelCodec
from ..server.reply import Reply
from ..server.request_stream import RequestStream
from ..server.table import format_table
from .entry_point import main
from .null_device import NullExecutor

WARM_UP_STEPS = 32
MAX_ROWS = 4096
VOCAB_SIZE = 1000


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """What steady decode steps cost on the host.

    Attributes:
      rows: Requests that decode.
      context_tokens: Of each, at the beginning.
      host_ms_per_step: Median.
      p99_ms: Of the steps; what collects garbage and allocates is in it.
    """

    rows: int
    context_tokens: int
    host_ms_per_step: float
    p99_ms: float


@dataclass(frozen=True, kw_only=True)
class Queue:
    """What waits while others decode, and in which order.

    Attributes:
      policy: Decides that.
      num_waiting: Requests that wait.
      num_tenants: Whose all requests are, in turn.
    """

    policy: PolicyName = "fcfs"
    num_waiting: int = 0
    num_tenants: int = 1


def measure(
    rows: int,
    context_tokens: int,
    num_steps: int,
    clock: Callable[[], float],
    queue: Queue = Queue(),
) -> HostCost:
    """Runs `rows` requests through an engine on a null device and times steady decode steps."""
    max_tokens = num_steps + 4 * WARM_UP_STEPS
    config = EngineConfig(
        max_num_seqs=rows,
        prefill_chunk_tokens=4096,
        scheduling=SchedulingConfig(policy=queue.policy, max_num_queued=rows + queue.num_waiting),
    )
    # Prompts come a few at a time, so the first has decoded long when the last one begins.
    most_tokens = context_tokens + max_tokens + rows
    costs = StepCosts(base_s=dict.fromkeys(StepShapes.from_config(config).all_keys(), 1e-3))
    limits = EngineLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=most_tokens,
        num_pages=rows * (most_tokens // config.page_size + 2) + 1,
        eos_token_ids=(),
    )
    engine = Engine(config, limits, NullExecutor(), clock, costs)
    for number in range(rows + queue.num_waiting):
        # Prompts that begin differently: none is read from the cache.
        prompt = tuple((number + at * 7) % VOCAB_SIZE for at in range(context_tokens))
        request = Request(
            request_id=f"request-{number}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens + rows),
            arrival_s=clock(),
            tenant=f"tenant-{number % queue.num_tenants}",
        )
        engine.add(admit(request, config, limits))
    while len(outputs := engine.step()) < rows:
        pass
    for _ in range(WARM_UP_STEPS):
        engine.step()
    gc.collect()
    steps_s: list[float] = []
    for _ in range(num_steps):
        began_s = clock()
        outputs = engine.step()
        steps_s.append(clock() - began_s)
        assert len(outputs) == rows, "not a steady decode step"
    assert engine.failure is None
    return HostCost(
        rows=rows,
        context_tokens=context_tokens,
        host_ms_per_step=statistics.median(steps_s) * 1e3,
        p99_ms=statistics.quantiles(steps_s, n=100)[-1] * 1e3,
    )


class _NullContext:
    """A client that takes every message at once; what it costs to encode one is paid."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def write(self, message: pb.GenerateEvent) -> None:
        self.num_bytes += len(message.SerializeToString())

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        raise AssertionError("nothing is refused here")

    def time_remaining(self) -> float | None:
        return None


async def front_end_us_per_token(num_tokens: int, clock: Callable[[], float]) -> float:
    """Microseconds that the front end spends on one token of one stream: default tokenizer."""
    path = fetch(DEFAULT_PRESET, default_cache_dir())
    codec = ModelCodec(load_tokenizer(path), _no_date)
    text = "The sea is never still, and what it takes it gives back in another place. "
    ids = codec.encode(text, add_special_tokens=False, parse_special_tokens=False)
    stream = RequestStream()
    context = _NullContext()
    stream.begin(
        1,
        lambda choice: ChoiceOutput(choice, codec.stream_decoder((), skip_special_tokens=True)),
        lambda reason, choice: None,
    )
    reply = Reply(context, stream, pb.Accepted(request_id="request", prompt_tokens=1))
    sending = asyncio.create_task(reply.send())
    await asyncio.sleep(0)
    began_s = clock()
    for number in range(num_tokens):
        stream.push(RequestOutput("request", (ids[number % len(ids)],)))
        await asyncio.sleep(0)  # the reply runs, as it does between two steps
    us_per_token = (clock() - began_s) / num_tokens * 1e6
    sending.cancel()
    return us_per_token


def _no_date() -> Any:
    raise NotImplementedError("no chat is rendered here")


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    flags.DEFINE_multi_integer(
        "rows",
        None,
        "Requests that decode at once; may be given several times. Default: 8 to 1024.",
        flag_values=values,
    )
    flags.DEFINE_multi_integer(
        "context_tokens",
        None,
        "Context of each request; may be given several times. Default: 64 and 2048.",
        flag_values=values,
    )
    defaults = Queue()
    flags.DEFINE_enum(
        "policy",
        defaults.policy,
        list(get_args(PolicyName)),
        "Who would get a slot first.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_waiting",
        defaults.num_waiting,
        "Requests that wait for a slot.",
        lower_bound=0,
        upper_bound=100_000,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_tenants",
        defaults.num_tenants,
        "Tenants whose requests these are, in turn.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer("steps", 400, "Steps that are timed.", lower_bound=100, flag_values=values)
    flags.DEFINE_bool("json", False, "Print one JSON object.", flag_values=values)


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Measures and prints."""
    rows = values.rows or ([256] if values.json else [8, 32, 64, 128, 256, 512, 1024])
    contexts = values.context_tokens or ([64] if values.json else [64, 2048])
    for name, given, most in (("rows", rows, MAX_ROWS), ("context_tokens", contexts, 65_536)):
        for value in given:
            if not 1 <= value <= most:
                raise UsageError(f"--{name} is {value}; it must be in [1, {most}]")
    clock = time.perf_counter
    queue = Queue(
        policy=values.policy, num_waiting=values.num_waiting, num_tenants=values.num_tenants
    )
    costs = [measure(n, context, values.steps, clock, queue) for context in contexts for n in rows]
    front_end_us = asyncio.run(front_end_us_per_token(20_000, clock))
    if values.json:
        first = costs[0]  # which was asked for first
        print(
            json.dumps(
                {
                    "rows": first.rows,
                    "context_tokens": first.context_tokens,
                    "host_ms_per_step": first.host_ms_per_step,
                    "host_p99_ms": first.p99_ms,
                    "front_end_us_per_token": front_end_us,
                    "all": [vars(cost) for cost in costs],
                }
            )
        )
        return 0
    print(
        format_table(
            ("rows", "context", "host ms/step", "p99 ms", "us/row", "front end ms/step"),
            [
                (
                    str(cost.rows),
                    str(cost.context_tokens),
                    f"{cost.host_ms_per_step:.3f}",
                    f"{cost.p99_ms:.3f}",
                    f"{cost.host_ms_per_step / cost.rows * 1e3:.2f}",
                    f"{front_end_us * cost.rows / 1e3:.2f}",
                )
                for cost in costs
            ],
        )
    )
    print(f"front end: {front_end_us:.1f} us per token (merge, detokenize, encode one message)")
    return 0


COMMAND = Command(
    program="python -m",
    name="octavo.bench.host_loop",
    summary="Measures what a decode step costs on the host, beside a device that takes no time.",
    define_flags=define_flags,
    run=run,
)


if __name__ == "__main__":
    sys.exit(main(COMMAND))

"""Rounds of load on one server: which prompts, in which order, and what is left out of the numbers.

A round of concurrency c is c clients in a closed loop, each sending the same number of requests.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from ..server import octavo_pb2 as pb
from ..server import octavo_pb2_grpc
from ..server.command_line import CommandError
from .closed_loop import Clock, Trace, run_closed_loop
from .workload import Mode, Workload, random_prompts, request, sampling_seeds, text_prompts


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How much of what.

    Attributes:
      workload: What every request looks like.
      concurrency: Levels, in the order in which they run.
      rounds: Timed rounds of each kind at each level.
      requests_per_client: Requests that each client sends in a round, one after the other.
      prompt_text: Text to cut prompts from. None: prompts of random ids.
    """

    workload: Workload
    concurrency: tuple[int, ...] = (1, 8, 32)
    rounds: int = 3
    requests_per_client: int = 2
    prompt_text: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and the bound."""
        if not self.concurrency:
            raise ValueError("concurrency is empty; it must have at least one level")
        for level in self.concurrency:
            if not 1 <= level <= 4096:
                raise ValueError(f"concurrency has {level}; each level must be in [1, 4096]")
        if len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError(f"concurrency is {self.concurrency}; no level may come twice")
        for name in ("rounds", "requests_per_client"):
            value = getattr(self, name)
            if not 1 <= value <= 1000:
                raise ValueError(f"{name} is {value}; it must be in [1, 1000]")

    @property
    def requests_per_round(self) -> dict[int, int]:
        """Of each level."""
        return {level: level * self.requests_per_client for level in self.concurrency}


class Load:
    """Sends rounds to one server.

    Attributes:
      model: What the server says it serves.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        model: pb.GetModelInfoResponse,
        prompts: Iterator[list[int]],
        workload: Workload,
        clock: Clock,
    ) -> None:
        """Load that takes its prompts from `prompts`, each once."""
        self.model = model
        self._stub = octavo_pb2_grpc.InferenceStub(channel)
        self._prompts = prompts
        self._workload = workload
        self._seeds = sampling_seeds(workload)
        self._clock = clock

    def take_prompts(self, count: int) -> list[list[int]]:
        """The next prompts."""
        return [next(self._prompts) for _ in range(count)]

    async def round(
        self, mode: Mode, concurrency: int, prompts: Sequence[Sequence[int]]
    ) -> list[Trace]:
        """Runs one round; traces in the order of the prompts.

        Raises:
          BenchmarkFailed: A request did not bring all its tokens.
        """
        requests = [request(self._workload, mode, prompt, next(self._seeds)) for prompt in prompts]
        return await run_closed_loop(self._stub, requests, concurrency, self._clock)


@asynccontextmanager
async def connected_load(address: str, options: LoadOptions, clock: Clock) -> AsyncGenerator[Load]:
    """Load on the server at host:port.

    Raises:
      CommandError: The server cannot be asked what it serves.
      ValueError: The text for prompts is too short.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            model = await octavo_pb2_grpc.ControlStub(channel).GetModelInfo(
                pb.GetModelInfoRequest()
            )
            prompts = await _prompts(channel, model, options)
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"{address}: {error.code().name}: {error.details()}") from error
        yield Load(channel, model, prompts, options.workload, clock)


async def _prompts(
    channel: grpc.aio.Channel, model: pb.GetModelInfoResponse, options: LoadOptions
) -> Iterator[list[int]]:
    if options.prompt_text is None:
        return random_prompts(options.workload, model.vocab_size)
    tokenized = await octavo_pb2_grpc.InferenceStub(channel).Tokenize(
        pb.TokenizeRequest(text=options.prompt_text, add_special_tokens=False)
    )
    return text_prompts(options.workload, tokenized.token_ids)

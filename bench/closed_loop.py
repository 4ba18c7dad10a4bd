"""A closed loop: so many clients, each sending its next request when it has its last answer whole.

One event loop and one channel carry all clients, so that the generator takes as little as it can
of the processors that it shares with the server.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from ..server import octavo_pb2 as pb
from ..server import octavo_pb2_grpc

type Clock = Callable[[], float]
"""Seconds, from anywhere; never goes back."""


class BenchmarkFailed(Exception):
    """A request did not bring what it must, so no number of the run would mean anything."""


@dataclass(kw_only=True)
class Trace:
    """What one request brought, and when.

    Attributes:
      sent_s: When it was sent.
      token_ids: Output ids.
      deltas: For each delta, when it came and how many ids it had.
    """

    sent_s: float
    token_ids: list[int] = field(default_factory=list)
    deltas: list[tuple[float, int]] = field(default_factory=list)


async def run_closed_loop(
    stub: octavo_pb2_grpc.InferenceStub,
    requests: Sequence[pb.GenerateRequest],
    concurrency: int,
    clock: Clock,
) -> list[Trace]:
    """Runs all requests, never more than `concurrency` at once; traces in the requests' order.

    Every request must bring exactly its max_tokens.

    Raises:
      BenchmarkFailed: One did not; the others are cancelled.
    """
    traces: dict[int, Trace] = {}
    waiting = iter(enumerate(requests))
    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(_client(stub, waiting, traces, clock))
    except* BenchmarkFailed as group:
        # All clients may fail at once, of one cause; the first says it.
        raise first_failure(group) from group
    return [traces[index] for index in range(len(requests))]


def first_failure(group: BaseException) -> BaseException:
    """The first exception in a group, however deep."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


async def _client(
    stub: octavo_pb2_grpc.InferenceStub,
    waiting: Iterator[tuple[int, pb.GenerateRequest]],
    traces: dict[int, Trace],
    clock: Clock,
) -> None:
    for index, request in waiting:
        try:
            traces[index] = await _run(stub, request, clock)
        except grpc.aio.AioRpcError as error:
            raise BenchmarkFailed(
                f"request {index} failed: {error.code().name}: {error.details()}"
            ) from error
        except BenchmarkFailed as error:
            raise BenchmarkFailed(f"request {index} {error}") from error


async def _run(
    stub: octavo_pb2_grpc.InferenceStub, request: pb.GenerateRequest, clock: Clock
) -> Trace:
    trace = Trace(sent_s=clock())
    completed: pb.Completed | None = None
    async for event in stub.Generate(request):
        kind = event.WhichOneof("event")
        if kind == "token_delta":
            now_s = clock()
            ids = event.token_delta.token_ids
            # A delta may bring text alone: the end of a character that was cut off.
            if ids:
                trace.deltas.append((now_s, len(ids)))
                trace.token_ids.extend(ids)
        elif kind == "failed":
            raise BenchmarkFailed(f"failed: {event.failed.message}")
        elif kind == "completed":
            completed = event.completed
    if completed is None:
        raise BenchmarkFailed("ended without a terminal event")
    wanted, found = request.sampling.max_tokens, len(trace.token_ids)
    if not wanted == found == completed.usage.completion_tokens:
        raise BenchmarkFailed(
            f"brought {found} tokens and its usage says {completed.usage.completion_tokens}; "
            f"it must be {wanted}"
        )
    return trace

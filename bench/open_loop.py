"""An open loop: requests come when they come, room or not, and who is refused tries once more.

One event loop and one channel carry all clients, as in the closed loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from ..server import octavo_pb2 as pb
from ..server import octavo_pb2_grpc
from ..server.client import retry_after_s
from .closed_loop import BenchmarkFailed, Clock, first_failure


@dataclass(kw_only=True)
class Visit:
    """One client with one request, from when it came; None: did not happen.

    Attributes:
      came_s: When it sent the request for the first time.
      refused_s: When it was told that there is no room.
      promised_s: In how many seconds there will be, as it was told then.
      is_let_in: The last try was accepted.
      ended_s: When it had the answer whole.
    """

    came_s: float
    refused_s: float | None = None
    promised_s: float | None = None
    is_let_in: bool = False
    ended_s: float | None = None


async def run_open_loop(
    stub: octavo_pb2_grpc.InferenceStub,
    requests: Sequence[pb.GenerateRequest],
    arrivals_s: Sequence[float],
    clock: Clock,
    *,
    obeys: bool,
) -> list[Visit]:
    """Sends every request at its time; visits in the requests' order.

    Args:
      stub: Of the server.
      requests: What is asked.
      arrivals_s: When, counted from now.
      clock: Seconds, as those of the event loop.
      obeys: Refused clients wait as long as they were told; else they try again at once. In either
        case once.

    Raises:
      BenchmarkFailed: A request failed, or a refusal did not say when to come back.
    """
    began_s = clock()
    try:
        async with asyncio.TaskGroup() as clients:
            tasks = [
                clients.create_task(_visit(stub, request, began_s + arrival_s, clock, obeys=obeys))
                for request, arrival_s in zip(requests, arrivals_s, strict=True)
            ]
    except* BenchmarkFailed as group:
        raise first_failure(group) from group
    return [task.result() for task in tasks]


async def _visit(
    stub: octavo_pb2_grpc.InferenceStub,
    request: pb.GenerateRequest,
    comes_s: float,
    clock: Clock,
    *,
    obeys: bool,
) -> Visit:
    await asyncio.sleep(comes_s - clock())
    visit = Visit(came_s=clock())
    promised_s = await _try(stub, request, visit, clock)
    if promised_s is not None:
        visit.refused_s, visit.promised_s = clock(), promised_s
        await asyncio.sleep(promised_s if obeys else 0)
        await _try(stub, request, visit, clock)
    return visit


async def _try(
    stub: octavo_pb2_grpc.InferenceStub, request: pb.GenerateRequest, visit: Visit, clock: Clock
) -> float | None:
    """Seconds after which to come back if it was refused, else None, and the answer was read."""
    last = ""
    try:
        async for event in stub.Generate(request):
            visit.is_let_in = True
            last = str(event.WhichOneof("event"))
    except grpc.aio.AioRpcError as error:
        wait_s = retry_after_s(error)
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or wait_s is None:
            raise BenchmarkFailed(
                f"a request failed: {error.code().name}: {error.details()}"
            ) from error
        return wait_s
    if last != "completed":
        raise BenchmarkFailed(f"a request ended with {last!r}")
    visit.ended_s = clock()
    return None

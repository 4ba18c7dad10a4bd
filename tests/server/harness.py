"""A real grpc.aio server on a free port with the fake engine behind it, and a client channel."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status.rpc_status import from_call

from octavo.server import octavo_pb2 as pb
from octavo.server import octavo_pb2_grpc
from octavo.server.server import Server, ServerConfig

from .fakes import FakeEngine, served

SLOW_READER = (
    # Makes the client's HTTP/2 window small, so that a server's write really waits for its reads.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
)


@dataclass
class Client:
    """The services at the other end of a channel."""

    channel: grpc.aio.Channel

    @property
    def inference(self) -> octavo_pb2_grpc.InferenceStub:
        return octavo_pb2_grpc.InferenceStub(self.channel)

    @property
    def control(self) -> octavo_pb2_grpc.ControlStub:
        return octavo_pb2_grpc.ControlStub(self.channel)


@dataclass
class Running(Client):
    server: Server
    engine: FakeEngine
    port: int

    async def run_to_end(self) -> None:
        """Steps the engine, letting the loop run in between, until it has no request."""
        while self.server.router:
            self.engine.step()
            await asyncio.sleep(0)


@asynccontextmanager
async def running(
    *,
    is_ready: bool = True,
    max_concurrent_calls: int = 64,
    clock: Callable[[], float] | None = None,
    channel_options: tuple[tuple[str, int], ...] = (),
    server_options: dict[str, Any] | None = None,
    model_facts: dict[str, Any] | None = None,
    on_drain_stage: Callable[[str], None] = lambda stage: None,
    **engine_options: Any,
) -> AsyncGenerator[Running]:
    server = Server(
        ServerConfig(port=0, max_concurrent_calls=max_concurrent_calls, **(server_options or {})),
        **({} if clock is None else {"clock": clock}),
        on_drain_stage=on_drain_stage,
    )
    port = await server.start()
    engine = FakeEngine(server.router.on_outputs, **engine_options)
    if is_ready:
        await server.set_ready(served(engine, **(model_facts or {})))
    address = f"127.0.0.1:{port}"
    try:
        async with grpc.aio.insecure_channel(address, options=channel_options) as channel:
            yield Running(channel, server, engine, port)
    finally:
        await server.stop()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


HEALTH_SERVICES = ("", "octavo.v1.Inference", "liveness")


async def health(at: Running) -> tuple[bool, ...]:
    """Whether each of HEALTH_SERVICES is SERVING."""
    stub: Any = health_pb2_grpc.HealthStub(at.channel)
    asked = [health_pb2.HealthCheckRequest(service=service) for service in HEALTH_SERVICES]
    answers = [await stub.Check(one) for one in asked]
    return tuple(a.status == health_pb2.HealthCheckResponse.SERVING for a in answers)


async def rest(call: Any) -> list[pb.GenerateEvent]:
    """Reads a stream to its end."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def refused(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """The error of a call that must not succeed."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"not refused: {answer}")


def reason_of(error: grpc.aio.AioRpcError) -> str:
    info = detail(error, ErrorInfo)
    assert info.domain == "octavo"
    return info.reason


def field_of(error: grpc.aio.AioRpcError) -> str:
    (violation,) = detail(error, BadRequest).field_violations
    return violation.field


def detail[M: Message](error: grpc.aio.AioRpcError, kind: type[M]) -> M:
    """The one detail of that kind in a rich status."""
    status = from_call(cast(grpc.Call, error))
    assert status is not None, error
    found = kind()
    (packed,) = [entry for entry in status.details if entry.Is(kind.DESCRIPTOR)]
    packed.Unpack(found)
    return found


def request(text: str = "hello", *, request_id: str = "", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        text=text,
        add_special_tokens=False,
        sampling=pb.Sampling(**{"max_tokens": 5, **sampling}),
    )


def kinds(events: list[pb.GenerateEvent]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


def token_ids(events: list[pb.GenerateEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_delta.token_ids]


def text(events: list[pb.GenerateEvent]) -> str:
    return b"".join(event.token_delta.text for event in events).decode()

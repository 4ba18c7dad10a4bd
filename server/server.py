"""One gRPC server: the port, its limits, and the way from loading to drained.

The port opens at once, so that health checks and clients get an answer while the model loads.
"""

import asyncio
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from . import octavo_pb2_grpc
from .call_interceptor import MAX_SEND_BYTES, CallInterceptor
from .concurrency import ConcurrencyGate
from .control_service import ControlService
from .inference_service import InferenceService
from .lifecycle import CONTROL_SERVICE, INFERENCE_SERVICE, Lifecycle
from .served_model import ServedModel
from .streams import Failure, FailureKind, StreamRouter

MAX_RECEIVE_BYTES = 16 << 20

FLUSH_S = 5.0
"""How long the last events of requests that a drain gave up may take to reach their clients."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where a server listens and what it bounds.

    Attributes:
      host: Interface to listen on: an address, or a name, which stands for its first address.
      port: 0 picks a free one.
      max_concurrent_calls: Most calls of the Inference service at once; one more is refused.
      min_ping_interval_ms: Clients may ping this often, with or without a call; one that pings
        much more often is disconnected. gRPC's own default, 300 s, disconnects well-behaved clients
        during a long prefill (https://github.com/sgl-project/sglang/pull/19986).
    """

    host: str = "127.0.0.1"
    port: int = 50051
    max_concurrent_calls: int = 2048
    min_ping_interval_ms: int = 10_000

    def address(self, port: int) -> str:
        """The host and a port as clients write them."""
        is_bare = ":" in self.host and not self.host.startswith("[")
        return f"[{self.host}]:{port}" if is_bare else f"{self.host}:{port}"


class Server:
    """Serves one model, which comes later. All methods run on the event loop.

    Attributes:
      lifecycle: Its state.
      router: Where the engine's outputs go.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        new_request_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """A server that does not listen yet; to be made on the running event loop."""
        self._config = config
        self.lifecycle = Lifecycle()
        self.router = StreamRouter(asyncio.get_running_loop())
        gate = ConcurrencyGate(config.max_concurrent_calls)
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor()], options=_channel_options(config)
        )
        octavo_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(
                self.lifecycle, self.router, gate, clock=clock, new_request_id=new_request_id
            ),
            self._server,
        )
        octavo_pb2_grpc.add_ControlServicer_to_server(
            ControlService(self.lifecycle, self.router), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.lifecycle.health, self._server)
        reflection.enable_server_reflection(
            (
                INFERENCE_SERVICE,
                CONTROL_SERVICE,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                reflection.SERVICE_NAME,
            ),
            self._server,
        )

    async def start(self) -> int:
        """Opens the port, not ready yet, and returns it.

        Raises:
          OSError: The port cannot be had.
        """
        config = self._config
        try:
            port = self._server.add_insecure_port(f"{_one_address(config.host)}:{config.port}")
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"cannot listen on {config.address(config.port)}: the port is taken, or the "
                "address is not one of this machine"
            ) from error
        await self.lifecycle.begin()
        await self._server.start()
        return port

    async def set_ready(self, model: ServedModel) -> None:
        """Takes requests for this model from here on."""
        await self.lifecycle.set_ready(model)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits for the running ones; ends the rest with Failed."""
        await self.lifecycle.set_draining()
        try:
            async with asyncio.timeout(timeout_s):
                await self.router.wait_all_closed()
        except TimeoutError:
            await self.give_up(
                f"the server shut down and the request had not ended {timeout_s:g} s later",
                FLUSH_S,
            )

    async def give_up(self, why: str, flush_s: float) -> None:
        """Ends every running request with Failed; its clients have flush_s seconds to read that."""
        self.router.fail_all(Failure(FailureKind.SHUTTING_DOWN, why))
        try:
            async with asyncio.timeout(flush_s):
                await self.router.wait_all_closed()
        except TimeoutError:
            # Clients that do not read. Stopping cancels their handlers, which abort.
            pass

    async def stop(self, grace_s: float = 0) -> None:
        """Closes the port and ends every call that is open grace_s seconds later."""
        await self._server.stop(grace_s)


def _one_address(host: str) -> str:
    """The first address of a host, IPv4 before IPv6, as gRPC writes it; raises OSError if none is.

    Given a name with several, gRPC is content when one of them is free: two servers would share a
    port, each with clients that mean the other.
    """
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    family, *_, (address, *_) = min(found, key=lambda each: each[0] != socket.AF_INET)
    return f"[{address}]" if family == socket.AF_INET6 else str(address)


def _channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Source: include/grpc/impl/channel_arg_names.h of gRPC."""
    return [
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", MAX_SEND_BYTES),
        # Two servers on one port would share its connections in silence.
        ("grpc.so_reuseport", 0),
        # The key has no "recv" in it, whatever the name of its C constant says.
        ("grpc.http2.min_ping_interval_without_data_ms", config.min_ping_interval_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        # Finds clients that vanished without a word, whose requests would otherwise run on.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]

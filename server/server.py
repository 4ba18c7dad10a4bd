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
from .drain import Drain
from .guide_checks import GuideChecks
from .inference_service import InferenceService
from .lifecycle import CONTROL_SERVICE, INFERENCE_SERVICE, Lifecycle
from .served_model import ServedModel
from .streams import StreamRouter

MAX_RECEIVE_BYTES = 16 << 20


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
      withdrawal_grace_s: How long a server that drains still takes requests.
      drain_timeout_s: How long running requests may go on after that.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    max_concurrent_calls: int = 2048
    min_ping_interval_ms: int = 10_000
    withdrawal_grace_s: float = 5.0
    drain_timeout_s: float = 60.0

    def address(self, port: int) -> str:
        """The host and a port as clients write them."""
        is_bare = ":" in self.host and not self.host.startswith("[")
        return f"[{self.host}]:{port}" if is_bare else f"{self.host}:{port}"


class Server:
    """Serves one model, which comes later. All methods run on the event loop.

    Attributes:
      lifecycle: Its state.
      router: Where the engine's outputs go.
      drain: Ends it in good order.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        new_request_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        on_drain_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """A server that does not listen yet; to be made on the running event loop.

        Args:
          config: Where it will listen.
          clock: Seconds; the engine's monotonic clock.
          new_request_id: Names requests whose client gave no id.
          on_drain_stage: Told what a drain is doing, for people.
        """
        self._config = config
        self.lifecycle = Lifecycle()
        self.router = StreamRouter(asyncio.get_running_loop())
        self.drain = Drain(
            self.lifecycle,
            self.router,
            timeout_s=config.drain_timeout_s,
            grace_s=config.withdrawal_grace_s,
            on_stage=on_drain_stage,
        )
        gate = ConcurrencyGate(config.max_concurrent_calls, clock)
        self._guide_checks = GuideChecks()
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor()], options=_channel_options(config)
        )
        octavo_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(
                self.lifecycle,
                self.router,
                gate,
                self._guide_checks,
                clock=clock,
                new_request_id=new_request_id,
            ),
            self._server,
        )
        octavo_pb2_grpc.add_ControlServicer_to_server(
            ControlService(self.lifecycle, self.router, self.drain), self._server
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
                f"cannot listen on {config.address(config.port)}: the port is taken (--port=0 "
                "picks a free one), or the address is not one of this machine"
            ) from error
        await self.lifecycle.begin()
        await self._server.start()
        return port

    async def set_ready(self, model: ServedModel) -> None:
        """Takes requests for this model from here on."""
        await self.lifecycle.set_ready(model)

    async def stop(self, grace_s: float = 0) -> None:
        """Closes the port and ends every call that is open grace_s seconds later."""
        await self._server.stop(grace_s)
        self._guide_checks.close()


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

"""The real server, engine thread, engine and scheduler; only the device is a fake that waits.

And a proxy whose connections can be broken in ways that a client library does not offer.
"""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, override

import grpc
import numpy as np
import pytest

from octavo.engine.engine_thread import EngineThread
from octavo.server import octavo_pb2 as pb
from octavo.server.server import Server, ServerConfig
from tests.engine.fakes import Clock, FakeExecutor, fake_engine, small_config

from .fakes import served
from .harness import Client, eventually


class RealClock(Clock):
    @override
    def __call__(self) -> float:
        return time.monotonic()


class Steps:
    """Lets the engine read as many steps as it is told to."""

    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor
        self._fetch = executor.fetch
        self._permits = threading.Semaphore(0)
        self._num_allowed = self._num_read = 0
        self._is_free = False
        self._is_waiting = False
        self._step_s = 0.0
        pytest.MonkeyPatch().setattr(executor, "fetch", self._wait_and_fetch)

    @property
    def num_dispatched(self) -> int:
        return len(self._executor.keys)

    async def run(self, number: int) -> None:
        """Returns when these are read and the engine waits for the next one."""
        self._num_allowed += number
        self._permits.release(number)
        await eventually(lambda: self._num_read == self._num_allowed and self._is_waiting)

    def run_freely(self, step_s: float = 0.0) -> None:
        """From now on; each takes so long at least."""
        self._step_s = step_s
        self._is_free = True
        self._permits.release()

    def _wait_and_fetch(self, result: tuple[int, np.ndarray]) -> np.ndarray:
        if not self._is_free:
            self._is_waiting = True
            self._permits.acquire()
            self._is_waiting = False
        time.sleep(self._step_s)
        self._num_read += 1
        return self._fetch(result)


@dataclass
class HostLoop(Client):
    """A server with four slots, chunks of 8 tokens and pages of 4."""

    server: Server
    thread: EngineThread
    steps: Steps
    port: int


@asynccontextmanager
async def host_loop(num_pages: int = 257, **config: Any) -> AsyncGenerator[HostLoop]:
    server = Server(ServerConfig(port=0))
    port = await server.start()
    engine, executor = fake_engine(small_config(**config), num_pages, RealClock())
    steps = Steps(executor)
    thread = EngineThread(engine, server.router.on_outputs, time.monotonic)
    thread.start()
    await server.set_ready(served(thread))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield HostLoop(channel, server, thread, steps, port)
    finally:
        steps.run_freely()
        thread.stop()
        await asyncio.to_thread(thread.join, 10.0)
        await server.stop()


def ids_request(request_id: str, num_prompt: int, max_tokens: int) -> pb.GenerateRequest:
    """Ids that differ from request to request, so that no two prompts begin alike."""
    ids = [(len(request_id) * 7 + sum(request_id.encode()) + i * i) % 40 for i in range(num_prompt)]
    return pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(ids=ids),
        sampling=pb.Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True),
    )


class Proxy:
    """Between a client and a server on this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._to_server: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        """Yields its address."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield "{}:{}".format(*server.sockets[0].getsockname())
        finally:
            server.close()
            for writer in self._to_server:
                writer.transport.abort()
            await asyncio.gather(*self._tasks)

    def close(self) -> None:
        """Ends the connections to the server as a process that exits does."""
        for writer in self._to_server:
            writer.close()

    def reset(self) -> None:
        """Ends them by RST, as a machine that fell over and came back does."""
        for writer in self._to_server:
            one = writer.get_extra_info("socket")
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        self._to_server.append(to_server)
        pumps = [_pump(reader, to_server), _pump(from_server, writer)]
        self._tasks += map(asyncio.ensure_future, pumps)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

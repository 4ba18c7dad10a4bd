"""A server inside this process, for commands that load a model themselves.

They talk to it over gRPC like to any other, so there is one way to generate.
"""

import asyncio
import sys
import threading
from collections.abc import Coroutine, Generator
from contextlib import contextmanager

from .progress import OnProgress
from .server import Server, ServerConfig
from .serving import ENGINE_END_S, SWITCH_INTERVAL_S, Loader


@contextmanager
def local_server(load: Loader, on_progress: OnProgress) -> Generator[str]:
    """Serves on a free port of the loopback interface while inside; yields host:port.

    Loading happens on the calling thread, the event loop on one of its own.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server", daemon=True)
    thread.start()

    def on_loop[T](coroutine: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    async def make_server() -> Server:
        return Server(ServerConfig(port=0))

    server = on_loop(make_server())
    try:
        port = on_loop(server.start())
        model = load(server.router.on_outputs, on_progress)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            on_loop(server.set_ready(model))
            yield f"127.0.0.1:{port}"
        finally:
            model.engine.stop()
            model.engine.join(ENGINE_END_S)
    finally:
        on_loop(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

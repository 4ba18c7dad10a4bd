"""Runs a server from opening the port to the last drained request."""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..engine.request import RequestOutput
from .progress import OnProgress, describe
from .served_model import ServedModel
from .server import Server, ServerConfig
from .watchdog import watch_engine

Loader = Callable[[Callable[[list[RequestOutput]], None], OnProgress], ServedModel]
"""Loads a model whose outputs go to the first argument; blocks; runs on a thread of its own."""

# A thread that waits for the GIL asks for it after this long. At Python's default of 5 ms the
# engine thread and the event loop hold each other up for that long several times a step; at 0.1 ms
# it is 0.25 ms (measured).
SWITCH_INTERVAL_S = 1e-4

GRACE_S = 1.0
"""How long the end of a call may take to reach its client when the server is about to go."""

ENGINE_END_S = 10.0
"""How long a stopped engine may take to end: it reads the step that is under way. One that hangs
in a step never does, and must not keep the process."""


async def serve_until_stopped(
    config: ServerConfig,
    load: Loader,
    *,
    stall_timeout_s: float,
    on_progress: OnProgress,
    announce: Callable[[str], None],
) -> bool:
    """Serves until SIGTERM, SIGINT or Control.Drain; a second signal stops at once.

    SIGTERM and Control.Drain leave load balancers the withdrawal grace; SIGINT, which comes from a
    person at a terminal, does not.

    Args:
      config: Where to listen, and how to drain.
      load: Brings the model.
      stall_timeout_s: An engine with work that completes no step for this long is not healthy.
      on_progress: Told about loading and draining; called on any thread.
      announce: Gets the READY line.

    Returns:
      True if a model was served, every request has ended, and so has the engine; False if a signal
      cut that short or the engine hangs: its threads may still run.

    Raises:
      OSError: The port cannot be had.
      Exception: Whatever `load` raises.
    """
    loop = asyncio.get_running_loop()
    server = Server(config, on_drain_stage=lambda stage: on_progress(stage, 0, 0))
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal(grace_s: float) -> None:
        # Counted apart from the drain: one that Control.Drain began is not cut short by the SIGTERM
        # that an orchestrator sends next.
        (second if first.is_set() else first).set()
        server.drain.begin(grace_s=grace_s)

    loop.add_signal_handler(signal.SIGTERM, on_signal, config.withdrawal_grace_s)
    loop.add_signal_handler(signal.SIGINT, on_signal, 0.0)
    port = await server.start()

    def on_load_progress(stage: str, done: int, total: int) -> None:
        server.lifecycle.stage = describe(stage, done, total)
        on_progress(stage, done, total)

    try:
        loading = _in_thread(lambda: load(server.router.on_outputs, on_load_progress))
        if not await _before(loading, server.drain.begun):
            # Whoever asked by Control.Drain may not have the answer yet.
            await server.stop(GRACE_S)
            return False
        model = await loading
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # before, it would only slow the compilations
        await server.set_ready(model)
        announce(
            f"READY grpc={config.address(port)} model={model.name} device={model.device} "
            f"attention={model.attention} pages={model.num_pages} slots={model.max_num_seqs} "
            f"compile_s={model.compile_s:.1f}"
        )
        watch = asyncio.create_task(
            watch_engine(
                model.engine, server.lifecycle, time.monotonic, stall_timeout_s=stall_timeout_s
            )
        )
        is_drained = await _before(asyncio.ensure_future(server.drain.ended.wait()), second)
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        if not is_drained:
            await server.drain.give_up("the server was told a second time to shut down", GRACE_S)
        # The last event is with the transport; its status may not be yet.
        await server.stop(GRACE_S)
        model.engine.stop()
        return is_drained and await _in_thread(lambda: model.engine.join(ENGINE_END_S))
    finally:
        await server.stop()


def _in_thread[T](function: Callable[[], T]) -> asyncio.Future[T]:
    """Runs a function on a daemon thread, so that a process that was told to stop need not wait."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_result(result: T) -> None:
        if not future.cancelled():
            future.set_result(result)

    def set_exception(error: BaseException) -> None:
        if not future.cancelled():
            future.set_exception(error)

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # goes to whoever awaits the future
            loop.call_soon_threadsafe(set_exception, error)
        else:
            loop.call_soon_threadsafe(set_result, result)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future


async def _before[T](work: asyncio.Future[T], event: asyncio.Event) -> bool:
    """Waits for either; True if the work was done before the event. Cancels it if not."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        waiting.cancel()
        if not work.done():
            work.cancel()

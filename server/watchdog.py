"""Readiness that looks at progress: an engine that failed or hangs is taken out of rotation.

Case: a server whose engine was dead and whose health check went on to say SERVING
(https://github.com/NVIDIA/TensorRT-LLM/pull/12313).
"""

import asyncio
from collections.abc import Callable

from .lifecycle import Lifecycle
from .served_model import EngineClient

CHECK_INTERVAL_S = 1.0


async def watch_engine(
    engine: EngineClient,
    lifecycle: Lifecycle,
    clock: Callable[[], float],
    *,
    stall_timeout_s: float,
) -> None:
    """Compares the engine's progress with the clock, for ever.

    Args:
      engine: Whose load says when it last made progress.
      lifecycle: Told whether the engine is sound.
      clock: The engine's.
      stall_timeout_s: With work waiting and no step completed for this long, the engine hangs. More
        than any step takes, or probes kill a server that is merely busy.
    """
    while True:
        load = engine.load()
        has_work = load.num_running + load.num_queued > 0 and not load.is_paused
        is_stalled = has_work and clock() - load.progress_s > stall_timeout_s
        await lifecycle.set_sound(not load.failed and not is_stalled)
        await asyncio.sleep(CHECK_INTERVAL_S)

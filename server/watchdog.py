"""Readiness that looks at progress: an engine that failed or hangs is taken out of rotation.

Case: a server whose engine was dead and whose health check went on to say SERVING
(https://github.com/NVIDIA/TensorRT-LLM/pull/12313).
"""

import asyncio
from collections.abc import Callable

from .lifecycle import Lifecycle
from .served_model import EngineClient

CHECK_INTERVAL_S = 1.0

STALL_S = 120.0
"""No step takes so long on any device; a shorter time would let probes kill a busy server."""


async def watch_engine(
    engine: EngineClient, lifecycle: Lifecycle, clock: Callable[[], float]
) -> None:
    """Compares the engine's progress with the clock, for ever.

    Args:
      engine: Whose load says when it last made progress.
      lifecycle: Told whether the engine is sound.
      clock: The engine's.
    """
    while True:
        load = engine.load()
        is_stalled = load.num_running + load.num_queued > 0 and clock() - load.progress_s > STALL_S
        await lifecycle.set_sound(not load.failed and not is_stalled)
        await asyncio.sleep(CHECK_INTERVAL_S)

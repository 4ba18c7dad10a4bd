"""Case 6.7: readiness follows progress."""

import asyncio

import pytest

from octavo.server import watchdog
from octavo.server.lifecycle import Lifecycle

from .fakes import FakeEngine
from .harness import eventually


def test_failure_and_stall_are_seen_and_idleness_is_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.001)

    async def scenario() -> None:
        now_s = 0.0
        engine, lifecycle = FakeEngine(lambda outputs: None), Lifecycle()
        seen: list[bool] = []

        async def record(is_sound: bool) -> None:
            seen.append(is_sound)

        monkeypatch.setattr(lifecycle, "set_sound", record)
        watch = asyncio.create_task(
            watchdog.watch_engine(engine, lifecycle, lambda: now_s, stall_timeout_s=50.0)
        )

        async def verdict() -> bool:
            seen.clear()
            await eventually(lambda: len(seen) > 1)
            return seen[-1]

        now_s = 1000.0
        assert await verdict()  # idle for long
        engine.submit_text("hello", arrival_s=1000.0)
        assert not await verdict()  # no step since there is work
        engine.is_paused = True
        assert await verdict()  # nothing steps, and nothing should
        engine.is_paused = False
        engine.progress_s = 950.0
        assert await verdict()  # busy: the step may take this long
        engine.progress_s = 949.0
        assert not await verdict()
        engine.failed = True
        engine.progress_s = 1000.0
        assert not await verdict()
        watch.cancel()

    asyncio.run(scenario())

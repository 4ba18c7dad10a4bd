"""Arrivals and second tries against a server whose engine refuses on demand.

Breaks when a client comes at another time, waits when it must not, or tries a third time.
"""

import asyncio
import time

import pytest

from octavo.bench.closed_loop import BenchmarkFailed
from octavo.bench.open_loop import Visit, run_open_loop
from octavo.engine.refusals import Overloaded

from ..server.harness import Running, eventually, request, running

WAIT_S = 0.3


async def _one(at: Running, *, obeys: bool, comes_s: float = 0.0) -> list[Visit]:
    return await run_open_loop(
        at.inference, [request(max_tokens=2)], [comes_s], time.monotonic, obeys=obeys
    )


def test_a_request_comes_at_its_time_and_is_read_to_its_end() -> None:
    async def scenario() -> None:
        async with running() as at:
            began_s = time.monotonic()
            task = asyncio.create_task(_one(at, obeys=True, comes_s=WAIT_S))
            await eventually(lambda: len(at.engine.submitted) == 1)
            await at.run_to_end()
            (visit,) = await task
            assert visit.came_s >= began_s + WAIT_S
            assert (visit.refused_s, visit.promised_s, visit.is_let_in) == (None, None, True)
            assert visit.ended_s is not None
            assert visit.ended_s > visit.came_s

    asyncio.run(scenario())


@pytest.mark.parametrize("obeys", [True, False])
def test_who_is_refused_tries_once_more_when_it_was_told_or_at_once(obeys: bool) -> None:
    async def scenario() -> None:
        async with running() as at:
            at.engine.refusal = Overloaded("full", "max_num_queued", WAIT_S)
            began_s = time.monotonic()
            (visit,) = await _one(at, obeys=obeys)
            assert (visit.promised_s, visit.is_let_in, visit.ended_s) == (WAIT_S, False, None)
            took_s = time.monotonic() - began_s
            assert took_s >= WAIT_S if obeys else took_s < WAIT_S

    asyncio.run(scenario())


def test_who_is_let_in_at_the_second_try_is_served() -> None:
    async def scenario() -> None:
        async with running() as at:
            at.engine.refusal = Overloaded("full", "max_num_queued", WAIT_S)
            task = asyncio.create_task(_one(at, obeys=True))
            await asyncio.sleep(WAIT_S / 2)
            at.engine.refusal = None
            await eventually(lambda: len(at.engine.submitted) == 1)
            await at.run_to_end()
            (visit,) = await task
            assert visit.refused_s is not None
            assert visit.is_let_in
            assert visit.ended_s is not None

    asyncio.run(scenario())


def test_other_failures_fail_the_run() -> None:
    async def scenario() -> None:
        async with running() as at:
            with pytest.raises(BenchmarkFailed, match="a request failed: INVALID_ARGUMENT: top_p"):
                await run_open_loop(
                    at.inference, [request(top_p=2)], [0.0], time.monotonic, obeys=True
                )
            at.engine.errors["bad"] = "fault"
            asked = [request(request_id="bad")]
            running_loop = asyncio.create_task(
                run_open_loop(at.inference, asked, [0.0], time.monotonic, obeys=True)
            )
            await eventually(lambda: len(at.engine.submitted) == 1)
            await at.run_to_end()
            with pytest.raises(BenchmarkFailed, match="a request ended with 'failed'"):
                await running_loop

    asyncio.run(scenario())

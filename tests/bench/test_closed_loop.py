"""The loop against a real server with the fake engine, which repeats each prompt.

Breaks when more requests are in flight than clients, when tokens are lost, or when a request that
failed still counts.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from octavo.bench.closed_loop import BenchmarkFailed, run_closed_loop
from octavo.bench.workload import Mode, Workload, request
from octavo.server import octavo_pb2 as pb

from ..server.harness import Running, eventually, running

WORKLOAD = Workload(output_tokens=6)


def requests(count: int) -> list[pb.GenerateRequest]:
    """With prompts of their own, so that swapped answers show."""
    made = []
    for index in range(count):
        asked = request(WORKLOAD, Mode.GREEDY, [index, index + 100], 0)
        asked.request_id = str(index)
        made.append(asked)
    return made


@asynccontextmanager
async def stepping(at: Running, may_step: Callable[[int], bool]) -> AsyncGenerator[None]:
    """Lets the engine go on while inside, whenever `may_step(requests in flight)`."""

    async def steps() -> None:
        while True:
            load = at.engine.load()
            if may_step(load.num_running + load.num_queued):
                at.engine.step()
            await asyncio.sleep(0.002)

    task = asyncio.create_task(steps())
    try:
        async with asyncio.timeout(20):
            yield
    finally:
        task.cancel()


@pytest.mark.parametrize("concurrency", [1, 3, 20])
@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_as_many_in_flight_as_clients_and_every_token_counts(
    concurrency: int, tokens_per_step: int
) -> None:
    in_flight: list[int] = []

    async def scenario() -> None:
        async with running(tokens_per_step=tokens_per_step, max_num_queued=100) as at:

            def may_step(num_live: int) -> bool:
                """When every client waits for an answer, and a moment later no other has come."""
                in_flight.append(num_live)
                num_ended = len(at.engine.submitted) - num_live
                is_full = num_live >= min(concurrency, 10 - num_ended)
                return is_full and in_flight[-3:] == [num_live] * 3

            async with stepping(at, may_step):
                ticks = itertools.count()
                traces = await run_closed_loop(
                    at.inference, requests(10), concurrency, lambda: float(next(ticks))
                )
            assert [trace.token_ids for trace in traces] == [[i, i + 100] * 3 for i in range(10)]
            for trace in traces:
                assert sum(num_tokens for _, num_tokens in trace.deltas) == 6
                times = [trace.sent_s, *(now_s for now_s, _ in trace.deltas)]
                assert times == sorted(set(times))
            assert sum(1 + len(trace.deltas) for trace in traces) == next(ticks)

    asyncio.run(scenario())
    assert max(in_flight) == min(concurrency, 10)


def failure(spoil: Callable[[Running, list[pb.GenerateRequest]], None]) -> str:
    """What the run says when one of its requests is spoilt."""

    async def scenario() -> str:
        async with running() as at:
            asked = requests(10)
            spoil(at, asked)
            async with stepping(at, lambda num_live: True):
                with pytest.raises(BenchmarkFailed) as failed:
                    await run_closed_loop(at.inference, asked, 4, lambda: 0.0)
                # The clients that were in the middle of something do not go on.
                await eventually(lambda: not at.server.router)
                assert len(at.engine.submitted) < 10
            return str(failed.value)

    return asyncio.run(scenario())


def test_a_failed_event_fails_the_run() -> None:
    said = failure(lambda at, asked: at.engine.errors.update({"2": "out of luck"}))
    assert said == "request 2 failed: out of luck"


def test_a_refused_request_fails_the_run() -> None:
    said = failure(lambda at, asked: asked[1].token_ids.ids.append(10**6))
    assert said.startswith("request 1 failed: INVALID_ARGUMENT: ")
    assert "1000000" in said


def test_an_output_that_ends_early_fails_the_run() -> None:
    said = failure(lambda at, asked: asked[3].sampling.stop_token_ids.append(103))
    assert said == "request 3 brought 2 tokens and its usage says 2; it must be 6"


def test_a_lost_server_fails_the_run() -> None:
    async def scenario() -> str:
        async with running() as at:
            loop = asyncio.create_task(run_closed_loop(at.inference, requests(4), 2, lambda: 0.0))
            await eventually(lambda: len(at.engine.submitted) == 2)
            await at.server.stop()
            with pytest.raises(BenchmarkFailed) as failed:
                await loop
            return str(failed.value)

    assert "failed: UNAVAILABLE" in asyncio.run(scenario())

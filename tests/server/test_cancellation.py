"""Clients that go away, over real connections and through the real host loop."""

import asyncio

import grpc
import pytest

from octavo.engine.request import FinishReason
from octavo.server import octavo_pb2 as pb
from octavo.server import octavo_pb2_grpc

from .harness import eventually, kinds, rest, token_ids
from .host_loop import HostLoop, Proxy, host_loop, ids_request

NUM_PROMPT = 160  # 20 chunks


async def _bring_to(at: HostLoop, moment: str) -> None:
    """Runs the engine until the newest request is there."""
    await at.steps.run({"queued": 6, "prefill": 5, "decode": 26}[moment])
    load = at.thread.load()
    assert (load.num_running, load.num_queued) == {"queued": (4, 1)}.get(moment, (1, 0))
    assert (load.output_tokens_total > 0) == (moment != "prefill")


@pytest.mark.parametrize("how", ["cancel", "close", "reset"])
@pytest.mark.parametrize("moment", ["queued", "prefill", "decode"])
def test_a_client_that_goes_away_leaves_nothing(moment: str, how: str) -> None:
    """Case 6.1: no step after the one in flight contains the request, and its pages are free."""

    async def scenario() -> None:
        async with host_loop() as at:
            others = []
            for number in range(4 if moment == "queued" else 0):
                others.append(at.inference.Generate(ids_request(f"other{number}", 2, 60)))
                await others[-1].read()
            proxy = Proxy(at.port)
            async with proxy.serving() as address, grpc.aio.insecure_channel(address) as channel:
                inference = octavo_pb2_grpc.InferenceStub(channel)
                call = inference.Generate(ids_request("gone", NUM_PROMPT, 60))
                await call.read()
                await _bring_to(at, moment)
                num_dispatched = at.steps.num_dispatched
                {"cancel": call.cancel, "close": proxy.close, "reset": proxy.reset}[how]()
                await eventually(lambda: not at.server.router.is_running("gone"))
                if others:
                    await at.steps.run(2)  # the one in flight, and one without it
                else:
                    at.steps.run_freely()
                await eventually(lambda: len(at.server.router) == len(others))
            load = at.thread.load()
            assert load.finished_total[FinishReason.CANCELLED] == 1
            assert load.prompt_tokens_total == (8 if others else NUM_PROMPT), "it got a slot"
            assert (load.num_running, load.num_queued) == (len(others), 0)
            if not others:
                assert at.steps.num_dispatched == num_dispatched
            at.steps.run_freely()
            for other in others:
                events = await rest(other)
                assert len(token_ids(events)) == 60
                assert kinds(events)[-1] == "completed"
            load = at.thread.load()
            assert load.num_free_pages == load.num_usable_pages

    asyncio.run(scenario())


def test_a_pool_full_of_cancelled_requests_takes_the_next_one() -> None:
    """Case 6.7: fails if what was cancelled is let go only when new work is scheduled."""

    async def scenario() -> None:
        async with host_loop(num_pages=21) as at:
            at.steps.run_freely()
            for turn in range(5):
                calls = [
                    at.inference.Generate(ids_request(f"{turn}-{number}", 30, 40))
                    for number in range(12)
                ]
                for call in calls:
                    await call.read()
                for call in calls:
                    call.cancel()
                probe = at.inference.Generate(ids_request(f"probe {turn}", 30, 10))
                async with asyncio.timeout(10):
                    events = await rest(probe)
                assert len(token_ids(events)) == 10
                assert kinds(events)[-1] == "completed"
                await eventually(lambda: len(at.server.router) == 0)
                load = at.thread.load()
                assert load.num_free_pages == load.num_usable_pages == 20
                assert (load.num_running, load.num_queued) == (0, 0)

    asyncio.run(scenario())


def test_pause_abort_all_and_resume_through_the_host_loop() -> None:
    async def scenario() -> None:
        async with host_loop() as at:
            calls = []
            for number in range(6):  # two of them queue
                calls.append(at.inference.Generate(ids_request(f"r{number}", 9, 60)))
                await calls[-1].read()
            await at.steps.run(5)
            await at.control.Pause(pb.PauseRequest())
            at.steps.run_freely()
            late = at.inference.Generate(ids_request("late", 9, 3))
            await late.read()
            assert (await at.control.Abort(pb.AbortRequest(request_id="late"))).found
            assert kinds(await rest(late)) == ["finished", "completed"]
            num_dispatched = at.steps.num_dispatched
            assert (await at.control.AbortAll(pb.AbortAllRequest())).num_aborted == 6
            for call in calls:
                events = await rest(call)
                assert kinds(events)[-2:] == ["finished", "completed"]
                assert events[-2].finished.reason == pb.FINISH_REASON_CANCELLED
            load = await at.control.GetLoad(pb.GetLoadRequest())
            assert load.is_paused
            assert load.num_free_pages == load.num_usable_pages
            waiting = at.inference.Generate(ids_request("waiting", 9, 3))
            await waiting.read()
            await asyncio.sleep(0.3)
            assert at.steps.num_dispatched == num_dispatched
            await at.control.Resume(pb.ResumeRequest())
            assert len(token_ids(await rest(waiting))) == 3

    asyncio.run(scenario())

"""Pause, resume, abort all and drain, over a real port."""

import asyncio
import math

import grpc
import pytest

from octavo.engine.request import FinishReason
from octavo.server import octavo_pb2 as pb

from .harness import (
    Running,
    eventually,
    field_of,
    health,
    kinds,
    reason_of,
    refused,
    request,
    rest,
    running,
    token_ids,
)


async def state(at: Running) -> pb.ServerState:
    return (await at.control.GetServerInfo(pb.GetServerInfoRequest())).state


async def load(at: Running) -> pb.GetLoadResponse:
    return await at.control.GetLoad(pb.GetLoadRequest())


def test_paused_requests_are_taken_and_wait() -> None:
    async def scenario() -> None:
        async with running(max_num_seqs=1, max_num_queued=1) as at:
            call = at.inference.Generate(request(max_tokens=2))
            await call.read()
            for _ in range(2):  # twice is no error
                await at.control.Pause(pb.PauseRequest())
                assert await health(at) == (False, False, True)
                assert await state(at) == pb.SERVER_STATE_PAUSED
                assert (await load(at)).is_paused
            queued = at.inference.Generate(request(max_tokens=2))
            assert kinds([await queued.read()]) == ["accepted"]
            # The queue is as bounded as ever.
            error = await refused(at.inference.Generate(request()).read())
            assert reason_of(error) == "QUEUE_FULL"
            at.engine.step(3)
            for _ in range(2):
                await at.control.Resume(pb.ResumeRequest())
                assert await health(at) == (True, True, True)
                assert await state(at) == pb.SERVER_STATE_READY
                assert not (await load(at)).is_paused
            await at.run_to_end()
            for one in (call, queued):
                assert token_ids(await rest(one)) == list(b"he")

    asyncio.run(scenario())


def test_neither_pause_nor_resume_nor_abort_before_the_model_is_there() -> None:
    async def scenario() -> None:
        async with running(is_ready=False) as at:
            for call in (
                at.control.Pause(pb.PauseRequest()),
                at.control.Resume(pb.ResumeRequest()),
                at.control.AbortAll(pb.AbortAllRequest()),
            ):
                assert reason_of(await refused(call)) == "LOADING"
            assert await state(at) == pb.SERVER_STATE_LOADING

    asyncio.run(scenario())


@pytest.mark.parametrize("is_paused", [False, True], ids=["running", "paused"])
def test_abort_all_ends_every_live_request_once(is_paused: bool) -> None:
    """Case 6.5; several choices of one request are in tests/engine/test_choices_end.py."""

    async def scenario() -> None:
        async with running(max_num_seqs=2) as at:
            calls = []
            for _ in range(4):
                calls.append(at.inference.Generate(request(max_tokens=100)))
                await calls[-1].read()
            at.engine.step(2)
            if is_paused:
                await at.control.Pause(pb.PauseRequest())
            for _ in range(2):
                answer = await at.control.AbortAll(pb.AbortAllRequest())
                assert answer.num_aborted == 4
            at.engine.step()
            for number, call in enumerate(calls):
                events = await rest(call)
                assert kinds(events)[-2:] == ["finished", "completed"]
                assert kinds(events).count("completed") == 1
                assert events[-2].finished.reason == pb.FINISH_REASON_CANCELLED
                assert token_ids(events) == (list(b"he") if number < 2 else [])
                assert await call.code() is grpc.StatusCode.OK
            assert (await at.control.AbortAll(pb.AbortAllRequest())).num_aborted == 0
            # New ones are taken as before.
            await at.control.Resume(pb.ResumeRequest())
            call = at.inference.Generate(request(max_tokens=1))
            await call.read()
            await at.run_to_end()
            assert kinds(await rest(call))[-1] == "completed"

    asyncio.run(scenario())


def test_a_request_that_ends_is_aborted_and_cancelled_at_that_very_step() -> None:
    """Case 6.5: one terminal event, whoever is faster, and nothing is left."""

    async def scenario() -> None:
        async with running() as at:
            for number in range(20):
                name = f"r{number}"
                call = at.inference.Generate(request(request_id=name, max_tokens=1))
                await call.read()
                abort = at.control.Abort(pb.AbortRequest(request_id=name))
                if number % 2:
                    at.engine.abort(name, FinishReason.CANCELLED)
                at.engine.step()
                await abort
                if number % 4 >= 2:
                    call.cancel()
                else:
                    events = await rest(call)
                    assert kinds(events).count("finished") == 1
                    assert kinds(events).count("completed") == 1
                await at.control.Abort(pb.AbortRequest(request_id=name))
                at.engine.step()
                await eventually(lambda: len(at.server.router) == 0)
                assert at.engine.load().num_running == 0

    asyncio.run(scenario())


def test_a_drain_leaves_time_to_withdraw_and_then_closes_the_door() -> None:
    async def scenario() -> None:
        stages: list[str] = []
        options = {"withdrawal_grace_s": 0.5, "drain_timeout_s": 30.0}
        async with running(server_options=options, on_drain_stage=stages.append) as at:
            first = at.inference.Generate(request(max_tokens=3))
            await first.read()
            await at.control.Drain(pb.DrainRequest())
            assert await health(at) == (False, False, True)
            assert await state(at) == pb.SERVER_STATE_DRAINING
            late = at.inference.Generate(request(max_tokens=3))
            assert kinds([await late.read()]) == ["accepted"]
            await at.control.Drain(pb.DrainRequest())  # twice is no error
            await asyncio.sleep(0.6)
            error = await refused(at.inference.Generate(request()).read())
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(error) == "DRAINING"
            assert not at.server.drain.ended.is_set()
            await at.run_to_end()
            for call in (first, late):
                assert kinds(await rest(call))[-1] == "completed"
            await asyncio.wait_for(at.server.drain.ended.wait(), 5)
            assert stages == [
                "taking requests for 0.5 s more, so that load balancers can withdraw; a second "
                "signal stops at once",
                "draining 2 streams; a second signal stops at once",
            ]

    asyncio.run(scenario())


def test_the_grace_passes_even_when_nothing_runs() -> None:
    """Requests of balancers that have not heard yet are still to come."""

    async def scenario() -> None:
        async with running(server_options={"withdrawal_grace_s": 0.3}) as at:
            at.server.drain.begin()
            await asyncio.sleep(0.1)
            assert not at.server.drain.ended.is_set()
            await asyncio.wait_for(at.server.drain.ended.wait(), 5)

    asyncio.run(scenario())


def test_the_time_of_a_drain_may_come_with_it() -> None:
    async def scenario() -> None:
        async with running(server_options={"withdrawal_grace_s": 0.0}) as at:
            call = at.inference.Generate(request(max_tokens=100))
            await call.read()
            await at.control.Drain(pb.DrainRequest(timeout_s=0))
            events = await rest(call)
            assert kinds(events) == ["failed"]
            assert events[0].failed.code == pb.FAILURE_CODE_SHUTTING_DOWN
            assert events[0].failed.retryable
            # One that is under way keeps its time, and says so.
            error = await refused(at.control.Drain(pb.DrainRequest(timeout_s=1)))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert reason_of(error) == "DRAINING"
            await at.control.Drain(pb.DrainRequest())

    asyncio.run(scenario())


def test_a_drain_time_that_cannot_be_begins_none() -> None:
    async def scenario() -> None:
        async with running() as at:
            for bad in (-1, math.nan, math.inf, -math.inf, 86_401):
                error = await refused(at.control.Drain(pb.DrainRequest(timeout_s=bad)))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert field_of(error) == "timeout_s"
            assert await state(at) == pb.SERVER_STATE_READY

    asyncio.run(scenario())


def test_a_drain_resumes_what_was_paused_and_is_not_paused_itself() -> None:
    """Fails if a paused server drains until its time is over."""

    async def scenario() -> None:
        async with running(server_options={"withdrawal_grace_s": 0.0}) as at:
            call = at.inference.Generate(request(max_tokens=2))
            await call.read()
            await at.control.Pause(pb.PauseRequest())
            await at.control.Drain(pb.DrainRequest())
            await eventually(lambda: not at.engine.is_paused)
            error = await refused(at.control.Pause(pb.PauseRequest()))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert reason_of(error) == "DRAINING"
            await at.control.Resume(pb.ResumeRequest())
            assert await state(at) == pb.SERVER_STATE_DRAINING
            await at.run_to_end()
            assert kinds(await rest(call))[-1] == "completed"
            await asyncio.wait_for(at.server.drain.ended.wait(), 5)

    asyncio.run(scenario())

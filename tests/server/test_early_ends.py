"""Generate, end to end over a real port: requests that are cancelled, aborted, late, or fail."""

import asyncio
from typing import NoReturn

import grpc
import pytest

from octavo.engine.request import FinishReason
from octavo.server import octavo_pb2 as pb

from .fakes import ByteCodec, ByteDecoder
from .harness import (
    eventually,
    kinds,
    reason_of,
    refused,
    request,
    rest,
    running,
    token_ids,
)


def test_cancel_reaches_the_engine_while_queued_and_while_streaming() -> None:
    async def scenario() -> None:
        async with running(max_num_seqs=1) as at:
            streaming = at.inference.Generate(request(request_id="a", max_tokens=100))
            await streaming.read()
            queued = at.inference.Generate(request(request_id="b", max_tokens=100))
            await queued.read()
            at.engine.step()
            await streaming.read()
            for call, request_id in ((queued, "b"), (streaming, "a")):
                call.cancel()
                await eventually(lambda id_=request_id: not at.server.router.is_running(id_))
                assert at.engine.aborted[-1] == (request_id, FinishReason.CANCELLED)
            # The ids are free again one step later, and the next request gets its own tokens only.
            error = await refused(at.inference.Generate(request(request_id="a")).read())
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS
            at.engine.step()
            await eventually(lambda: len(at.server.router) == 0)
            call = at.inference.Generate(request("xyz", request_id="a", max_tokens=2))
            await call.read()
            await at.run_to_end()
            assert token_ids(await rest(call)) == list(b"xy")

    asyncio.run(scenario())


def test_a_lost_connection_is_a_cancel() -> None:
    async def scenario() -> None:
        async with running() as at:
            call = at.inference.Generate(request(request_id="a", max_tokens=100))
            await call.read()
            await at.channel.close()
            await eventually(lambda: at.engine.aborted == [("a", FinishReason.CANCELLED)])
            at.engine.step()
            await eventually(lambda: len(at.server.router) == 0)

    asyncio.run(scenario())


def test_a_deadline_goes_to_the_engine_and_ends_the_call() -> None:
    async def scenario() -> None:
        async with running(clock=lambda: asyncio.get_running_loop().time()) as at:
            now_s = asyncio.get_running_loop().time()
            call = at.inference.Generate(request(request_id="a", max_tokens=100), timeout=0.3)
            await call.read()
            deadline_s = at.engine.submitted[0].deadline_s
            assert deadline_s is not None
            assert now_s < deadline_s < now_s + 1
            error = await refused(call.read())
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await eventually(lambda: at.engine.aborted == [("a", FinishReason.DEADLINE)])

    asyncio.run(scenario())


def test_abort_by_the_control_service() -> None:
    async def scenario() -> None:
        async with running() as at:
            call = at.inference.Generate(request(request_id="a", max_tokens=100))
            await call.read()
            at.engine.step(3)
            answers = [await at.control.Abort(pb.AbortRequest(request_id=id_)) for id_ in "ab"]
            assert [answer.found for answer in answers] == [True, False]
            at.engine.step()
            events = await rest(call)
            assert token_ids(events) == list(b"hel")
            assert events[-2].finished.reason == pb.FINISH_REASON_CANCELLED
            assert events[-1].completed.usage.completion_tokens == 3
            assert not (await at.control.Abort(pb.AbortRequest(request_id="a"))).found

    asyncio.run(scenario())


def test_an_engine_error_is_one_failed_event_and_status_ok() -> None:
    async def scenario() -> None:
        async with running() as at:
            at.engine.errors["a"] = "not enough pages"
            call = at.inference.Generate(request(request_id="a"))
            await call.read()
            other = at.inference.Generate(request(request_id="b"))
            await other.read()
            await at.run_to_end()
            events = await rest(call)
            assert kinds(events) == ["failed"]
            assert events[0].failed == pb.Failed(
                code=pb.FAILURE_CODE_INTERNAL, message="not enough pages", retryable=False
            )
            assert await call.code() is grpc.StatusCode.OK
            assert kinds(await rest(other))[-1] == "completed"

    asyncio.run(scenario())


def test_our_own_bugs_are_internal_and_keep_their_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 7.5: no exception text to clients; one failure, one transport; others go on."""

    async def scenario() -> None:
        async with running() as at:
            other = at.inference.Generate(request(request_id="other"))
            await other.read()

            def fail(*_: object, **__: object) -> NoReturn:
                raise RuntimeError("secret")

            monkeypatch.setattr(ByteCodec, "encode", fail)
            error = await refused(at.inference.Generate(request()).read())
            assert error.code() is grpc.StatusCode.INTERNAL
            assert reason_of(error) == "INTERNAL"
            assert "secret" not in str(error.details())
            monkeypatch.undo()

            broken = at.inference.Generate(request(request_id="broken"))
            await broken.read()
            monkeypatch.setattr(ByteDecoder, "push", fail)
            at.engine.step()
            events = await rest(broken)
            assert kinds(events) == ["failed"]
            assert events[0].failed.code == pb.FAILURE_CODE_INTERNAL
            assert "secret" not in events[0].failed.message
            assert await broken.code() is grpc.StatusCode.OK
            assert ("broken", FinishReason.CANCELLED) in at.engine.aborted
            monkeypatch.undo()
            assert caplog.text.count("RuntimeError: secret") >= 2

    asyncio.run(scenario())

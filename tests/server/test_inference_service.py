"""Generate, end to end over a real port: what is refused, and what an accepted request gets."""

import asyncio
import math
import threading
from typing import Any, NoReturn

import grpc
import pytest

from octavo.engine.request import FinishReason
from octavo.server import call_interceptor
from octavo.server import octavo_pb2 as pb
from octavo.server.concurrency import ConcurrencyGate
from octavo.server.inference_service import InferenceService
from octavo.server.server import MAX_RECEIVE_BYTES
from octavo.server.status import Refusal

from .fakes import EOS, MAX_MODEL_LEN, VOCAB_SIZE, ByteCodec, ByteDecoder
from .harness import (
    SLOW_READER,
    eventually,
    field_of,
    kinds,
    reason_of,
    refused,
    request,
    rest,
    running,
    text,
    token_ids,
)


def test_events_come_in_order_and_say_everything() -> None:
    async def scenario() -> None:
        async with running() as at:
            asked = request(request_id="a", max_tokens=3)
            asked.response.logprobs = True
            asked.response.prompt_logprobs = True
            call = at.inference.Generate(asked)
            await eventually(lambda: at.server.router.is_running("a"))
            await at.run_to_end()
            events = await rest(call)
            assert [event.seq for event in events] == list(range(len(events)))
            names = kinds(events)
            assert names[:2] == ["accepted", "prompt_logprobs"]
            assert set(names[2:-2]) == {"token_delta"}
            assert names[-2:] == ["finished", "completed"]
            assert events[0].accepted == pb.Accepted(request_id="a", prompt_tokens=5)
            assert list(events[1].prompt_logprobs.logprobs) == [-1, -2, -3, -4]
            assert token_ids(events) == list(b"hel")
            assert text(events) == "hel"
            assert [p for e in events for p in e.token_delta.logprobs] == [0, -1, -2]
            assert events[-2].finished.reason == pb.FINISH_REASON_LENGTH
            assert not events[-2].finished.HasField("stop_token_id")
            end = events[-1].completed
            assert end.usage == pb.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)
            assert (end.timings.queue_s, end.timings.ttft_s, end.timings.e2e_s) == (0.25, 0.5, 1)
            assert end.num_preemptions == 3
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(scenario())


@pytest.mark.parametrize("options", [(), SLOW_READER], ids=["fast channel", "small window"])
def test_a_slow_reader_loses_nothing(options: tuple[tuple[str, int], ...]) -> None:
    """Case 6.3: fails if pending deltas overwrite each other, or text is cut inside a character."""

    async def scenario() -> None:
        async with running(channel_options=options, tokens_per_step=3) as at:
            asked = request("añ€😀" * 50, request_id="a", max_tokens=2000)
            asked.response.logprobs = True
            call = at.inference.Generate(asked)
            await eventually(lambda: at.server.router.is_running("a"))
            events = []
            while at.engine.load().num_running:
                at.engine.step(50)  # the reader gets one event in the time of fifty steps
                events.append(await call.read())
            events += await rest(call)
            expected = [("añ€😀" * 50).encode()[i % 500] for i in range(2000)]
            assert token_ids(events) == expected
            assert text(events) == bytes(expected).decode()
            logprobs = [p for e in events for p in e.token_delta.logprobs]
            assert logprobs == [-float(i) for i in range(2000)]
            assert kinds(events)[-2:] == ["finished", "completed"]
            # Merged: far fewer events than the 667 steps.
            assert len(events) < 60

    asyncio.run(scenario())


def test_each_delta_holds_whole_characters() -> None:
    async def scenario() -> None:
        async with running() as at:
            call = at.inference.Generate(request("😀", request_id="a", max_tokens=7))
            await eventually(lambda: at.server.router.is_running("a"))
            events = [await call.read()]
            for _ in range(7):
                at.engine.step()
                events.append(await call.read())
            texts = [event.token_delta.text.decode() for event in events[1:]]
            # The second character lacks a byte at the end: it is marked, and not lost.
            assert texts == ["", "", "", "😀", "", "", "\ufffd"]

    asyncio.run(scenario())


def test_stop_ids_and_special_tokens() -> None:
    async def scenario() -> None:
        async with running() as at:
            asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[65, EOS, 66]))
            for skip, expected in ((None, "A"), (False, "A<256>")):
                if skip is not None:
                    asked.response.skip_special_tokens = skip
                call = at.inference.Generate(asked)
                await eventually(lambda: at.engine.load().num_running == 1)
                await at.run_to_end()
                events = await rest(call)
                assert events[-2].finished == pb.Finished(
                    reason=pb.FINISH_REASON_STOP, stop_token_id=EOS
                )
                assert token_ids(events) == [65, EOS]
                assert text(events) == expected

    asyncio.run(scenario())


def test_absent_sampling_fields_are_defaults_and_zero_is_zero() -> None:
    async def scenario() -> None:
        async with running() as at:
            calls = [
                at.inference.Generate(pb.GenerateRequest(text="a", request_id="absent")),
                at.inference.Generate(request("a", request_id="zero", temperature=0, seed=0)),
            ]
            await eventually(lambda: len(at.engine.submitted) == 2)
            by_id = {request.request_id: request for request in at.engine.submitted}
            absent, zero = by_id["absent"], by_id["zero"]
            assert absent.sampling.temperature == 1
            assert absent.sampling.max_tokens is None
            assert absent.sampling.seed is None
            assert absent.prompt_token_ids == (257, 97)
            assert zero.sampling.temperature == 0
            assert zero.sampling.seed == 0
            assert zero.prompt_token_ids == (97,)
            for call in calls:
                call.cancel()

    asyncio.run(scenario())


def test_chat_goes_through_the_template() -> None:
    async def scenario() -> None:
        async with running() as at:
            chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
            answer = await at.inference.Tokenize(pb.TokenizeRequest(chat=chat))
            assert bytes(answer.token_ids) == b"<user>hi"
            call = at.inference.Generate(pb.GenerateRequest(chat=chat))
            await eventually(lambda: len(at.engine.submitted) == 1)
            assert bytes(at.engine.submitted[0].prompt_token_ids) == b"<user>hi"
            call.cancel()

    asyncio.run(scenario())


NAN = math.nan
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "sampling.max_tokens"),
    ({"max_tokens": -1}, "sampling.max_tokens"),
    *[({"temperature": bad}, "sampling.temperature") for bad in (NAN, math.inf, -math.inf, -0.1)],
    *[({"top_p": bad}, "sampling.top_p") for bad in (NAN, math.inf, 0, 1.1, -1)],
    *[({"min_p": bad}, "sampling.min_p") for bad in (NAN, math.inf, 1.1, -0.1)],
    *[({"top_k": bad}, "sampling.top_k") for bad in (-2, 2**40)],
    *[
        ({"stop_token_ids": [1, bad]}, "sampling.stop_token_ids")
        for bad in (-1, VOCAB_SIZE, 2**31, 2**32 + 5, -(2**63))
    ],
]


def test_bad_sampling_fields_are_named() -> None:
    """Case 7.3 and 7.4: nothing reaches the engine, and the engine goes on for others."""

    async def scenario() -> None:
        async with running() as at:
            for sampling, field in BAD_FIELDS:
                error = await refused(at.inference.Generate(request(**sampling)).read())
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, sampling
                assert field_of(error) == field
                assert reason_of(error) == "INVALID_FIELD"
                assert field.split(".")[1] in str(error.details())
            assert at.engine.submitted == []
            assert len(at.server.router) == 0

    asyncio.run(scenario())


CHAT = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
BAD_REQUESTS = {
    "no field set": (pb.GenerateRequest(), "input"),
    "empty text": (pb.GenerateRequest(text="", add_special_tokens=False), "text"),
    "no ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
    "id too large": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, VOCAB_SIZE])), "token_ids"),
    "negative id": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "token_ids"),
    "33 bit id": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 + 1])), "token_ids"),
    "too many ids": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * MAX_MODEL_LEN)),
        "token_ids",
    ),
    "text too long": (pb.GenerateRequest(text="a" * MAX_MODEL_LEN), "text"),
    "no messages": (pb.GenerateRequest(chat=pb.ChatMessages()), "chat.messages"),
    "unknown role": (
        pb.GenerateRequest(
            chat=pb.ChatMessages(messages=[pb.ChatMessage(role="robot", content="hi")])
        ),
        "chat.messages",
    ),
    "special tokens with ids": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), add_special_tokens=True),
        "add_special_tokens",
    ),
    "special tokens with chat": (
        pb.GenerateRequest(chat=CHAT, add_special_tokens=False),
        "add_special_tokens",
    ),
    "parsing with chat": (
        pb.GenerateRequest(chat=CHAT, parse_special_tokens=True),
        "parse_special_tokens",
    ),
    "text that cannot be encoded": (pb.GenerateRequest(text="a<257>"), "text"),
    "long request id": (pb.GenerateRequest(text="a", request_id="x" * 257), "request_id"),
}


def test_bad_requests_are_named() -> None:
    async def scenario() -> None:
        async with running() as at:
            for name, (bad, field) in BAD_REQUESTS.items():
                error = await refused(at.inference.Generate(bad).read())
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
                assert field_of(error) == field, name
            assert at.engine.submitted == []
            assert len(at.server.router) == 0

    asyncio.run(scenario())


def test_refusals_before_acceptance() -> None:
    async def scenario() -> None:
        async with running(max_num_seqs=1, max_num_queued=1) as at:
            wrong_model = request()
            wrong_model.model = "other"
            error = await refused(at.inference.Generate(wrong_model).read())
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert reason_of(error) == "UNKNOWN_MODEL"
            assert "'fake'" in str(error.details())

            live = at.inference.Generate(request(request_id="a"))
            await eventually(lambda: at.server.router.is_running("a"))
            error = await refused(at.inference.Generate(request(request_id="a")).read())
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS
            assert reason_of(error) == "DUPLICATE_REQUEST_ID"

            queued = at.inference.Generate(request(request_id="b"))
            await eventually(lambda: at.server.router.is_running("b"))
            error = await refused(at.inference.Generate(request(request_id="c")).read())
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(error) == "QUEUE_FULL"

            # None of the refused ones disturbs those that run.
            await at.run_to_end()
            for call in (live, queued):
                assert kinds(await rest(call))[-1] == "completed"

    asyncio.run(scenario())


def test_an_oversized_message_is_refused() -> None:
    async def scenario() -> None:
        async with running() as at:
            big = request("a" * MAX_RECEIVE_BYTES)
            error = await refused(at.inference.Generate(big).read())
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert at.engine.submitted == []

    asyncio.run(scenario())


@pytest.mark.parametrize("character", ["x", "\U0001f600"])
def test_a_refusal_arrives_however_long_the_value_is(character: str) -> None:
    """Fails if the message grows with the value: clients take trailers of 8 KiB at most."""

    async def scenario() -> None:
        async with running() as at:
            asked = request()
            asked.model = character * 100_000
            error = await refused(at.inference.Generate(asked).read())
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert field_of(error) == "model"
            details = str(error.details())
            assert details.startswith("model is ")
            assert details.endswith("this server has 'fake'")

            chat = pb.ChatMessages(messages=[pb.ChatMessage(role=character * 100_000)])
            error = await refused(at.inference.Generate(pb.GenerateRequest(chat=chat)).read())
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field_of(error) == "chat.messages"

    asyncio.run(scenario())


def test_a_response_that_is_too_large_to_send_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if it is left to gRPC, which writes a traceback to the log for what a client asked."""
    monkeypatch.setattr(call_interceptor, "MAX_SEND_BYTES", 100)

    async def scenario() -> None:
        async with running() as at:
            error = await refused(at.inference.Tokenize(pb.TokenizeRequest(text="a" * 100)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(error) == "RESPONSE_TOO_LARGE"
            assert "must have at most 100" in str(error.details())
            answer = await at.inference.Tokenize(pb.TokenizeRequest(text="a" * 50))
            assert len(answer.token_ids) == 51
            assert not caplog.text

    asyncio.run(scenario())


def test_a_chat_of_many_small_messages_does_not_hold_up_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails if only the length of the contents decides where a chat is rendered."""
    threads: list[threading.Thread] = []

    def encode_chat(codec: ByteCodec, messages: object) -> list[int]:
        threads.append(threading.current_thread())
        return [1]

    async def scenario() -> None:
        async with running() as at:
            for number in (1, 1000):
                chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user")] * number)
                await at.inference.Tokenize(pb.TokenizeRequest(chat=chat))

    monkeypatch.setattr(ByteCodec, "encode_chat", encode_chat)
    asyncio.run(scenario())
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


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


@pytest.mark.parametrize(
    "raw", [b"\xff\xff\xff", b"\x1a\x02\xed\xa0"], ids=["no proto", "no UTF-8"]
)
def test_what_cannot_be_parsed_is_the_clients_fault(raw: bytes) -> None:
    async def scenario() -> None:
        async with running() as at:
            error = await refused(
                at.channel.unary_stream("/octavo.v1.Inference/Generate")(raw).read()
            )
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason_of(error) == "MALFORMED_MESSAGE"

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


def test_an_expired_deadline_runs_nothing() -> None:
    """Case 10.7. A client's own library ends such a call before it is sent, so no port here."""

    class LateContext:
        async def write(self, message: pb.GenerateEvent) -> None:
            raise AssertionError(message)

        async def abort_with_status(self, status: grpc.Status) -> NoReturn:
            raise AssertionError(status)

        def time_remaining(self) -> float:
            return 0.0

    async def scenario() -> None:
        async with running() as at:
            service = InferenceService(
                at.server.lifecycle,
                at.server.router,
                ConcurrencyGate(1, lambda: 0.0),
                clock=lambda: 0.0,
                new_request_id=lambda: "a",
            )
            with pytest.raises(Refusal, match="deadline had passed") as refusal:
                await service.Generate(request(), LateContext())
            assert refusal.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert at.engine.submitted == []

    asyncio.run(scenario())


def test_text_is_bounded_before_it_is_tokenised() -> None:
    """A text under the message limit would keep the tokenizer busy for a minute and more."""
    too_long = "a" * (1 << 20)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=too_long)])

    async def scenario() -> None:
        async with running() as at:
            for bad, field in (
                (pb.GenerateRequest(text=too_long), "text"),
                (pb.GenerateRequest(chat=chat), "chat"),
            ):
                error = await refused(at.inference.Generate(bad).read())
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert field_of(error) == field
                assert "at most 1048576" in (error.details() or "")
            error = await refused(at.inference.Tokenize(pb.TokenizeRequest(text=too_long)))
            assert field_of(error) == "text"

    asyncio.run(scenario())

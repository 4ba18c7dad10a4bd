"""Generate, end to end over a real port: what is refused, by which name, before anything ran."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any, NoReturn, override

import grpc
import pytest

from octavo.server import call_interceptor
from octavo.server import octavo_pb2 as pb
from octavo.server.concurrency import ConcurrencyGate
from octavo.server.guide_checks import GuideChecks
from octavo.server.inference_service import InferenceService
from octavo.server.server import MAX_RECEIVE_BYTES
from octavo.server.status import Refusal

from .fakes import MAX_MODEL_LEN, VOCAB_SIZE, ByteCodec
from .harness import (
    eventually,
    field_of,
    kinds,
    reason_of,
    refused,
    request,
    rest,
    running,
)

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

BAD_WITHOUT_PROMPT: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "sampling.n"),
    ({"repetition_penalty": 0}, "sampling.repetition_penalty"),
    ({"presence_penalty": 3}, "sampling.presence_penalty"),
    ({"logit_bias": {1: 101}}, "sampling.logit_bias[1]"),
    ({"banned_token_ids": [-1]}, "sampling.banned_token_ids"),
    ({"allowed_token_ids": pb.TokenIds()}, "sampling.allowed_token_ids"),
    ({"guide": pb.Guide(regex="a" * (1 << 18 | 1))}, "sampling.guide.regex"),
    ({"guide": pb.Guide(regex="a"), "ignore_eos": True}, "sampling.ignore_eos"),
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
            chat=pb.ChatMessages(messages=[*CHAT.messages, pb.ChatMessage(role="robot")])
        ),
        "chat.messages[1].role",
    ),
    "a chat that the template refuses": (
        pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="tool")])),
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


def test_what_needs_no_prompt_is_refused_before_one_is_tokenised() -> None:
    """A text of a MiB takes seconds: fails if it is tokenised for a request that can never run."""

    class Untouched(ByteCodec):
        @override
        def encode(
            self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool
        ) -> list[int]:
            raise AssertionError("it was tokenised")

        @override
        def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
            raise AssertionError("it was tokenised")

    async def scenario() -> None:
        async with running(model_facts={"codec": Untouched()}) as at:
            for sampling, field in [*BAD_FIELDS, *BAD_WITHOUT_PROMPT]:
                if field != "sampling.max_tokens":  # its bound is what the prompt leaves
                    for one in (pb.GenerateRequest(text="a"), pb.GenerateRequest(chat=CHAT)):
                        one.sampling.MergeFrom(pb.Sampling(**sampling))
                        error = await refused(at.inference.Generate(one).read())
                        assert field_of(error) == field, sampling
            one = pb.GenerateRequest(text="a", response=pb.ResponseOptions(top_logprobs=21))
            error = await refused(at.inference.Generate(one).read())
            assert field_of(error) == "response.top_logprobs"

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
            assert field_of(error) == "chat.messages[0].role"
            assert str(error.details()).startswith("chat.messages[0].role is ")

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
                GuideChecks(),
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

"""Generate, end to end over a real port: what an accepted request gets."""

import asyncio
import threading

import grpc
import pytest

from octavo.server import octavo_pb2 as pb

from .fakes import EOS, ByteCodec
from .harness import (
    SLOW_READER,
    eventually,
    kinds,
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
            assert names[:2] == ["accepted", "prompt_delta"]
            assert set(names[2:-2]) == {"token_delta"}
            assert names[-2:] == ["finished", "completed"]
            assert events[0].accepted == pb.Accepted(request_id="a", prompt_tokens=5)
            assert list(events[1].prompt_delta.logprobs) == [-1, -2, -3, -4]
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


@pytest.mark.parametrize(("top_logprobs", "most_tokens"), [(None, 10), (1, 5), (4, 2)])
def test_most_likely_ids_count_for_the_size_of_a_delta(
    top_logprobs: int | None, most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 11.3. Fails if what a request asks for beside each token is not in the bound."""
    monkeypatch.setattr("octavo.server.logprobs.MAX_ENTRIES_PER_PIECE", 10)

    async def scenario() -> None:
        async with running(tokens_per_step=100) as at:
            asked = request(max_tokens=30)
            asked.response.MergeFrom(pb.ResponseOptions(logprobs=True, top_logprobs=top_logprobs))
            call = at.inference.Generate(asked)
            await eventually(lambda: bool(at.engine.submitted))
            await at.run_to_end()
            deltas = [event.token_delta for event in await rest(call)]
            assert max(len(delta.token_ids) for delta in deltas) == most_tokens
            assert sum(len(delta.logprobs) for delta in deltas) == 30

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

"""Case 6.3: whatever the interleaving of steps and reads, readers get what the engine brought."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.request import FinishReason, RequestOutput
from octavo.server import streams
from octavo.server.streams import Failure, FailureKind, RequestStream, StreamRouter


def output(start: int, count: int, *, is_last: bool = False) -> RequestOutput:
    ids = tuple(range(start, start + count))
    return RequestOutput(
        request_id="a",
        token_ids=ids,
        logprobs=tuple(-float(i) for i in ids),
        finish_reason=FinishReason.LENGTH if is_last else None,
    )


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=30), st.integers(0, 12))
def test_nothing_is_lost_for_any_interleaving(
    steps: list[tuple[int, bool]], num_prompt_logprobs: int
) -> None:
    async def scenario() -> None:
        stream = RequestStream()
        got_ids: list[int] = []
        got_logprobs: list[float] = []
        got_prompt: list[float] = []
        ends = []

        async def read() -> None:
            piece = await stream.take()
            assert not (got_ids and piece.prompt_logprobs)  # the prompt's come first
            assert len(piece.token_ids) <= 5
            got_prompt.extend(piece.prompt_logprobs)
            got_ids.extend(piece.token_ids)
            got_logprobs.extend(piece.logprobs)
            if piece.end is not None:
                ends.append(piece.end)

        prompt = tuple(map(float, range(num_prompt_logprobs)))
        stream.push(RequestOutput(request_id="a", prompt_logprobs=prompt))
        total = 0
        for count, reads in steps:
            stream.push(output(total, count))
            total += count
            if reads:
                await read()
        stream.push(output(total, 2, is_last=True))
        while not ends:
            await read()
        assert got_prompt == list(prompt)
        assert got_ids == list(range(total + 2))
        assert got_logprobs == [-float(i) for i in range(total + 2)]
        assert [end.finish_reason for end in ends] == [FinishReason.LENGTH]

    limit = streams.MAX_TOKENS_PER_PIECE
    streams.MAX_TOKENS_PER_PIECE = 5
    try:
        asyncio.run(scenario())
    finally:
        streams.MAX_TOKENS_PER_PIECE = limit


def test_the_first_end_counts() -> None:
    async def scenario() -> None:
        stream, failure = RequestStream(), Failure(FailureKind.SHUTTING_DOWN, "bye")
        stream.push(output(0, 2))
        stream.fail(failure)
        stream.push(output(2, 2, is_last=True))
        piece = await stream.take()
        assert list(piece.token_ids) == [0, 1]
        assert piece.end is failure
        assert stream.is_engine_done

    asyncio.run(scenario())


def test_one_wake_up_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step with many requests schedules one callback for each."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        router = StreamRouter(loop)
        original, num_wake_ups = loop.call_soon_threadsafe, 0

        def counted(*args: Any) -> asyncio.Handle:
            nonlocal num_wake_ups
            num_wake_ups += 1
            return original(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        open_streams = [router.open(str(i)) for i in range(20)]
        router.on_outputs([RequestOutput(request_id=str(i), token_ids=(i,)) for i in range(20)])
        assert num_wake_ups == 1
        for i, stream in enumerate(open_streams):
            assert list((await stream.take()).token_ids) == [i]

    asyncio.run(scenario())


def test_an_id_stays_taken_until_the_engine_let_go() -> None:
    async def scenario() -> None:
        router = StreamRouter(asyncio.get_running_loop())
        router.open("a").is_submitted = True
        assert router.is_running("a")
        assert router.close("a")  # the engine holds it, so somebody has to abort it
        assert not router.is_running("a")
        assert len(router) == 1
        router.on_outputs([output(0, 0, is_last=True)])
        await asyncio.wait_for(router.wait_all_closed(), 1)
        router.open("a")
        assert not router.close("a")  # never submitted

    asyncio.run(scenario())

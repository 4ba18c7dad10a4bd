"""Case 6.3: whatever the interleaving of steps and reads, readers get what the engine brought."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.request import FinishReason, RequestOutput, Timings
from octavo.server.choice_output import ChoiceOutput, Piece
from octavo.server.logprobs import Logprobs
from octavo.server.request_stream import (
    Abort,
    Failure,
    FailureKind,
    Outcome,
    RequestStream,
)
from octavo.server.streams import StreamRouter

from .fakes import ByteDecoder

NUM_TOP = 2


def output(start: int, count: int, *, is_last: bool = False, choice: int = 0) -> RequestOutput:
    """Ids [start, start + count), with numbers that say where they belong."""
    ids = tuple(range(start, start + count))
    return RequestOutput(
        request_id="a",
        choice=choice,
        token_ids=ids,
        logprobs=tuple(-float(i) for i in ids),
        top_token_ids=tuple(i + rank for i in ids for rank in range(NUM_TOP)),
        top_logprobs=tuple(-float(i) for i in ids for _ in range(NUM_TOP)),
        finish_reason=FinishReason.LENGTH if is_last else None,
    )


def no_abort(reason: FinishReason, choice: int | None) -> None:
    pass


class Aborts(list[tuple[FinishReason, int | None]]):
    """What the engine was told."""

    def __call__(self, reason: FinishReason, choice: int | None) -> None:
        self.append((reason, choice))


def make_choice(choice: int) -> ChoiceOutput:
    return ChoiceOutput(choice, ByteDecoder(True), num_top=NUM_TOP)


def stream(num_choices: int = 1, *, num_prompt_logprobs: int = 0) -> RequestStream:
    made = RequestStream()
    made.begin(
        num_choices,
        make_choice,
        no_abort,
        num_prompt_logprobs=num_prompt_logprobs,
    )
    return made


async def read_all(one: RequestStream) -> tuple[list[Logprobs | Piece], Outcome | Failure]:
    pieces: list[Logprobs | Piece] = []
    while isinstance(news := await asyncio.wait_for(one.take(), 1), Logprobs | Piece):
        pieces.append(news)
    return pieces, news


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens with two most likely ids each."""
    monkeypatch.setattr("octavo.server.logprobs.MAX_ENTRIES_PER_PIECE", 15)


STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.booleans()), max_size=30)


@given(STEPS, st.integers(0, 12), st.integers(0, 20))
def test_nothing_is_lost_for_any_interleaving(
    steps: list[tuple[int, int, bool]], num_prompt: int, prompt_step: int
) -> None:
    """Three choices. Breaks if a piece overwrites another, or one goes before its turn."""

    async def scenario() -> None:
        one = stream(3, num_prompt_logprobs=num_prompt)
        got: list[Logprobs | Piece] = []
        totals = [0, 0, 0]

        async def read() -> None:
            news = await asyncio.wait_for(one.take(), 1)
            assert isinstance(news, Logprobs | Piece)
            got.append(news)

        for number, (choice, count, reads) in enumerate([*steps, (0, 0, False)]):
            if number == min(prompt_step, len(steps)):
                prompt = tuple(map(float, range(num_prompt)))
                tops = tuple(range(num_prompt * NUM_TOP))
                one.push(
                    RequestOutput(
                        "a",
                        prompt_logprobs=prompt,
                        prompt_top_token_ids=tops,
                        prompt_top_logprobs=tuple(map(float, tops)),
                    )
                )
            one.push(output(totals[choice], count, choice=choice))
            totals[choice] += count
            if reads and one.has_news:
                await read()
        for choice in range(3):
            one.push(output(totals[choice], 2, is_last=True, choice=choice))
        rest, end = await read_all(one)
        got += rest
        assert isinstance(end, Outcome)

        prompts = [piece for piece in got if isinstance(piece, Logprobs)]
        assert got[: len(prompts)] == prompts  # before all output
        assert [p for piece in prompts for p in piece.values] == list(range(num_prompt))
        tops = [p for piece in prompts for p in piece.top_token_ids]
        assert tops == list(range(num_prompt * NUM_TOP))
        assert all(len(piece.values) <= 5 for piece in prompts)
        for choice in range(3):
            pieces = [p for p in got if isinstance(p, Piece) and p.choice == choice]
            ids = list(range(totals[choice] + 2))
            assert [i for piece in pieces for i in piece.token_ids] == ids
            logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
            assert [p for part in logprobs for p in part.values] == [-float(i) for i in ids]
            tops = [i for part in logprobs for i in part.top_token_ids]
            assert tops == [i + rank for i in ids for rank in range(NUM_TOP)]
            assert all(len(piece.token_ids) <= 5 for piece in pieces)
            assert [piece.end is not None for piece in pieces] == [False] * (len(pieces) - 1) + [
                True
            ]
            text = "".join(text for piece in pieces for text in piece.texts)
            expected = bytes(i for i in ids if i < 256).decode(errors="replace")
            assert text == expected

    asyncio.run(scenario())


def test_choices_take_turns() -> None:
    """Fails if a choice with much to say keeps the others from being read."""

    async def scenario() -> None:
        one = stream(3)
        for choice, count in ((0, 15), (1, 5), (2, 10)):
            one.push(output(0, count, choice=choice, is_last=True))
        pieces, _ = await read_all(one)
        assert [piece.choice for piece in pieces if isinstance(piece, Piece)] == [0, 1, 2, 0, 2, 0]

    asyncio.run(scenario())


def test_the_outcome_is_of_all_choices() -> None:
    """Fails if choice 0's own end, or the last choice's beginning, is taken for the request's."""

    def last(choice: int, **numbers: float) -> RequestOutput:
        timings = Timings(arrival_s=1.0, **numbers)
        return output(0, 1, is_last=True, choice=choice)._replace(
            num_cached_tokens=10 + choice, num_preemptions=1 + choice, timings=timings
        )

    async def scenario() -> None:
        one = stream(2)
        one.push(last(1, admitted_s=5.0, first_token_s=6.0, finished_s=9.0))
        assert one.num_cached_tokens == 0
        one.push(last(0, admitted_s=2.0, first_token_s=3.0, finished_s=7.0))
        assert one.num_cached_tokens == 10
        _, end = await read_all(one)
        timings = Timings(arrival_s=1.0, admitted_s=2.0, first_token_s=3.0, finished_s=9.0)
        assert end == Outcome(num_cached_tokens=10, num_preemptions=3, timings=timings)

    asyncio.run(scenario())


def test_the_first_end_counts() -> None:
    async def scenario() -> None:
        one, failure = stream(), Failure(FailureKind.SHUTTING_DOWN, "bye")
        one.push(output(0, 2))
        one.fail(failure)
        one.push(output(2, 2, is_last=True))
        (piece,), end = await read_all(one)
        assert isinstance(piece, Piece)
        assert list(piece.token_ids) == [0, 1]
        assert end is failure
        assert one.is_engine_done

        one = stream()
        one.push(output(0, 2, is_last=True))
        one.fail(failure)
        assert isinstance((await read_all(one))[1], Outcome)

    asyncio.run(scenario())


def test_an_error_of_one_choice_ends_all() -> None:
    async def scenario() -> None:
        aborted = Aborts()
        one = RequestStream()
        one.begin(
            3,
            make_choice,
            aborted,
        )
        one.push(output(65, 2, choice=0))
        one.push(output(65, 3, choice=1, is_last=True))
        one.push(RequestOutput("a", choice=2, finish_reason=FinishReason.ERROR, error="NaN"))
        assert aborted == [(FinishReason.CANCELLED, None)]
        one.push(output(67, 2, choice=0))
        pieces, end = await read_all(one)
        got = {p.choice: list(p.token_ids) for p in pieces if isinstance(p, Piece)}
        assert got == {0: [65, 66], 1: [65, 66, 67], 2: []}
        assert end == Failure(FailureKind.INTERNAL, "NaN")
        assert not one.is_engine_done
        one.push(RequestOutput("a", choice=0, finish_reason=FinishReason.CANCELLED))
        assert one.is_engine_done

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
        open_streams = [opened(router, str(i)) for i in range(20)]
        router.on_outputs([RequestOutput(request_id=str(i), token_ids=(i,)) for i in range(20)])
        assert num_wake_ups == 1
        for i, one in enumerate(open_streams):
            piece = await one.take()
            assert isinstance(piece, Piece)
            assert list(piece.token_ids) == [i]

    asyncio.run(scenario())


def opened(
    router: StreamRouter,
    request_id: str,
    num_choices: int = 1,
    abort: Abort = no_abort,
) -> RequestStream:
    """Of a request that the engine has accepted."""
    one = router.open(request_id)
    one.begin(num_choices, make_choice, abort)
    return one


def test_an_id_stays_taken_until_the_engine_let_go_of_all_choices() -> None:
    async def scenario() -> None:
        router = StreamRouter(asyncio.get_running_loop())
        opened(router, "a", 2)
        assert router.is_running("a")
        assert router.close("a")  # the engine holds it, so somebody has to abort it
        assert not router.is_running("a")
        assert len(router) == 1
        router.on_outputs([output(0, 0, is_last=True)])
        await asyncio.sleep(0)
        assert len(router) == 1
        router.on_outputs([output(0, 0, is_last=True, choice=1)])
        await asyncio.wait_for(router.wait_all_closed(), 1)
        router.open("a")
        assert not router.close("a")  # never submitted

    asyncio.run(scenario())


def test_output_that_cannot_be_read_ends_its_own_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 1.2. Fails if those that come behind it in the same step lose their tokens.

    As they would if what cannot be decoded were asked for the text that it holds back.
    """

    async def scenario() -> None:
        router = StreamRouter(asyncio.get_running_loop())
        aborted = Aborts()
        broken = opened(router, "a", 2, aborted)
        other = opened(router, "b")

        def push(decoder: ByteDecoder, token_ids: tuple[int, ...]) -> str:
            if token_ids == (1,):
                raise RuntimeError("a bug")
            return "fine"

        def flush(decoder: ByteDecoder) -> str:
            raise RuntimeError("a decoder that is broken stays so")

        monkeypatch.setattr(ByteDecoder, "push", push)
        monkeypatch.setattr(ByteDecoder, "flush", flush)
        router.on_outputs([RequestOutput("a", (1,)), RequestOutput("b", (2,))])
        piece = await asyncio.wait_for(other.take(), 1)
        assert isinstance(piece, Piece)
        assert piece.texts == ["fine"]
        assert aborted == [(FinishReason.CANCELLED, None)]
        _, end = await read_all(broken)
        assert isinstance(end, Failure)
        assert "a bug" not in end.message
        assert "a bug" in caplog.text

    asyncio.run(scenario())

"""Stop strings, end to end over a real port. What the matcher does is test_choice_output's."""

import asyncio
from typing import Any

import pytest

from octavo.engine.request import FinishReason
from octavo.server import octavo_pb2 as pb

from .fakes import EOS
from .harness import (
    SLOW_READER,
    eventually,
    field_of,
    kinds,
    refused,
    request,
    rest,
    running,
    text,
    token_ids,
)


async def answered(asked: pb.GenerateRequest, **options: Any) -> list[pb.GenerateEvent]:
    async with running(**options) as at:
        call = at.inference.Generate(asked)
        await eventually(lambda: bool(at.engine.submitted))
        await at.run_to_end()
        return await rest(call)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("include_stop", [None, False, True])
def test_ids_numbers_and_usage_are_cut_where_the_text_is(
    tokens_per_step: int, include_stop: bool | None
) -> None:
    """Case 2.6: each way of stepping gives what one token at a time does."""

    async def scenario() -> None:
        asked = request("abSTOPxyz", max_tokens=9, stop=["xyz", "STOP"], include_stop=include_stop)
        asked.response.logprobs = True
        asked.response.top_logprobs = 2
        events = await answered(asked, tokens_per_step=tokens_per_step)
        assert text(events) == ("abSTOP" if include_stop else "ab")
        assert token_ids(events) == list(b"abSTOP")
        deltas = [event.token_delta for event in events]
        assert [p for delta in deltas for p in delta.logprobs] == [0, -1, -2, -3, -4, -5]
        tops = [top for delta in deltas for top in delta.top_logprobs]
        assert [list(top.token_ids) for top in tops] == [[i, i + 1] for i in range(6)]
        assert events[-2].finished == pb.Finished(reason=pb.FINISH_REASON_STOP, stop="STOP")
        assert events[-1].completed.usage.completion_tokens == 6
        assert events[-1].completed.timings.HasField("ttft_s")  # the engine's last output came

    asyncio.run(scenario())


def test_the_engine_is_told_though_nobody_reads() -> None:
    """Fails if the search waits for the client: a slow reader would let the engine run on."""

    async def scenario() -> None:
        async with running(channel_options=SLOW_READER, tokens_per_step=1000) as at:
            asked = request("x" * 999 + "\n", request_id="a", max_tokens=3000, stop=["\nx"])
            asked.response.logprobs = True
            call = at.inference.Generate(asked)
            await eventually(lambda: at.server.router.is_running("a"))
            at.engine.step()
            await asyncio.sleep(0.01)
            assert at.engine.aborted_choices == []  # "\n" alone is the beginning of it
            at.engine.step()
            await eventually(lambda: at.engine.aborted_choices == [("a", FinishReason.STOP, 0)])
            at.engine.step()
            await eventually(lambda: not at.engine.load().num_running)
            events = await rest(call)
            assert text(events) == "x" * 999
            assert token_ids(events) == [*b"x" * 999, *b"\nx"]
            assert events[-1].completed.usage.completion_tokens == 1001
            assert at.engine.aborted == []  # once is enough

    asyncio.run(scenario())


def test_nothing_is_aborted_that_the_engine_ended() -> None:
    """A stop string, or none, at the very token that the engine ends by."""

    async def scenario() -> None:
        async with running() as at:
            for stop, max_tokens in (("c", 3), ("b", 2), ("z", 3)):
                call = at.inference.Generate(request("abc", max_tokens=max_tokens, stop=[stop]))
                await call.read()
                await at.run_to_end()
                end = (await rest(call))[-2].finished
                assert end.stop == ("" if stop == "z" else stop)
            assert at.engine.aborted_choices == []
            assert at.engine.aborted == []

    asyncio.run(scenario())


def test_finished_does_not_wait_for_the_engine_and_completed_does() -> None:
    """The id is free when Completed has come. Fails if the end is only known one step later."""

    async def scenario() -> None:
        async with running() as at:
            call = at.inference.Generate(request("ab", request_id="a", max_tokens=9, stop=["b"]))
            await call.read()
            at.engine.step(2)
            events = [await call.read() for _ in range(2)]
            while events[-1].WhichOneof("event") != "finished":
                events.append(await call.read())
            assert at.server.router.is_running("a")
            at.engine.step()
            assert kinds(await rest(call)) == ["completed"]
            assert len(at.server.router) == 0

    asyncio.run(scenario())


ENDS = {
    "EOS": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_CANCELLED,
    "deadline": pb.FINISH_REASON_DEADLINE,
}


@pytest.mark.parametrize("end", [*ENDS, "error", "shutdown"])
def test_held_back_text_leaves_at_every_other_end(end: str) -> None:
    """Case 2.1. The last word is the beginning of a stop string that does not come."""

    async def scenario() -> None:
        async with running() as at:
            asked = request(request_id="a", max_tokens=5 if end == "length" else 50)
            asked.sampling.stop.append("Paris, France")
            asked.token_ids.ids.extend([*b"Paris", EOS if end == "EOS" else ord("!")])
            asked.ClearField("add_special_tokens")
            call = at.inference.Generate(asked)
            await call.read()
            at.engine.step(5)
            await asyncio.sleep(0)  # the outputs are delivered
            match end:
                case "abort":
                    await at.control.Abort(pb.AbortRequest(request_id="a"))
                case "deadline":
                    at.engine.abort("a", FinishReason.DEADLINE)
                case "error":
                    at.engine.errors["a"] = "NaN"
                case "shutdown":
                    await at.server.drain.give_up("bye", 0)
            at.engine.step()
            events = await rest(call)
            assert text(events) == "Paris"
            if end in ENDS:
                assert events[-2].finished.reason == ENDS[end]
                assert not events[-2].finished.stop
            else:
                assert kinds(events)[-1] == "failed"

    asyncio.run(scenario())


def test_a_shutdown_after_the_match_fails_nothing() -> None:
    """Fails if a request whose output is complete ends with Failed for want of the engine."""

    async def scenario() -> None:
        async with running() as at:
            call = at.inference.Generate(request("ab", max_tokens=9, stop=["b"]))
            await call.read()
            at.engine.step(2)
            await eventually(lambda: bool(at.engine.aborted_choices))
            await at.server.drain.give_up("bye", 0)
            events = await rest(call)
            assert kinds(events)[-2:] == ["finished", "completed"]
            assert not events[-1].completed.HasField("timings")

    asyncio.run(scenario())


def test_min_tokens_with_a_stop_string() -> None:
    """Case 2.5: a newline as token 2, and min_tokens."""

    async def scenario() -> None:
        # Newlines are tokens 2, 5, 8, ...: the first that counts comes after min_tokens tokens.
        for min_tokens, wanted in ((0, "a"), (1, "a"), (2, "a\nba"), (20, "a\nb" * 7 + "a")):
            asked = request("a\nb", max_tokens=30, stop=["\n"], min_tokens=min_tokens)
            assert text(await answered(asked)) == wanted

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("stops", "field", "said"),
    [
        (["a"] * 17, "sampling.stop", "stop has 17 strings; it must have 1 to 16"),
        (["a", ""], "sampling.stop[1]", "stop[1] is 0 characters long; it must be 1 to 256"),
        (["é" * 257], "sampling.stop[0]", "stop[0] is 257 characters long; it must be 1 to 256"),
    ],
)
def test_stop_strings_out_of_bounds_are_named(stops: list[str], field: str, said: str) -> None:
    """Case 11.3."""

    async def scenario() -> None:
        async with running() as at:
            error = await refused(at.inference.Generate(request(stop=stops)).read())
            assert field_of(error) == field
            assert error.details() == said
            assert at.engine.submitted == []

    asyncio.run(scenario())

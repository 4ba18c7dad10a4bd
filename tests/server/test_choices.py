"""n > 1, end to end over a real port. The fake engine begins choice c at prompt token c."""

import asyncio

import grpc
import pytest

from octavo.engine.request import FinishReason
from octavo.server import octavo_pb2 as pb

from .fakes import EOS
from .harness import eventually, field_of, kinds, refused, request, rest, running


def by_choice(events: list[pb.GenerateEvent], index: int) -> tuple[list[int], str]:
    deltas = [event.token_delta for event in events if event.token_delta.index == index]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return ids, b"".join(delta.text for delta in deltas).decode()


def finishes(events: list[pb.GenerateEvent]) -> dict[int, pb.Finished]:
    ends = [event.finished for event in events if event.WhichOneof("event") == "finished"]
    found = {end.index: end for end in ends}
    assert len(found) == len(ends), "a choice finished twice"
    return found


@pytest.mark.parametrize("reads_late", [False, True])
@pytest.mark.parametrize("tokens_per_step", [1, 2, 16])
def test_usage_of_three_choices(reads_late: bool, tokens_per_step: int) -> None:
    """Case 2.7: each delta's usage is monotone, and the last one is the sum of the choices.

    All end by stop strings, choice 1 by one with which it begins.
    """

    async def scenario() -> None:
        async with running(tokens_per_step=tokens_per_step) as at:
            asked = pb.GenerateRequest(
                request_id="a",
                token_ids=pb.TokenIds(ids=[*b"aSbTc", EOS]),
                sampling=pb.Sampling(n=3, max_tokens=40, stop=["Sb", "Tc"]),
                response=pb.ResponseOptions(continuous_usage=True, logprobs=True),
            )
            call = at.inference.Generate(asked)
            events = [await call.read()]
            while at.engine.load().num_running:
                at.engine.step()
                await asyncio.sleep(0 if reads_late else 0.002)
            events += await rest(call)
            assert by_choice(events, 0) == (list(b"aSb"), "a")
            assert by_choice(events, 1) == (list(b"Sb"), "")  # emptied by the stop string
            assert by_choice(events, 2) == (list(b"bTc"), "b")
            assert {i: end.stop for i, end in finishes(events).items()} == {
                0: "Sb",
                1: "Sb",
                2: "Tc",
            }
            deltas = [event.token_delta for event in events if event.HasField("token_delta")]
            assert all(delta.HasField("usage") for delta in deltas)
            assert any(delta.index == 1 and not delta.text for delta in deltas)
            counts, total = [delta.usage.completion_tokens for delta in deltas], 0
            for delta, count in zip(deltas, counts, strict=True):
                total += len(delta.token_ids)
                assert count == total
                assert delta.usage.prompt_tokens == 6
            assert kinds(events)[-1] == "completed"
            assert events[-1].completed.usage == pb.Usage(
                prompt_tokens=6, completion_tokens=8, cached_tokens=2
            )
            assert [event.seq for event in events] == list(range(len(events)))

    asyncio.run(scenario())


def test_each_choice_ends_by_itself_and_completed_is_of_all() -> None:
    """Fails if the stream ends with the first choice, or usage and times are of one."""

    async def scenario() -> None:
        async with running() as at:
            asked = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[*b"abcde", EOS]),
                sampling=pb.Sampling(n=3, max_tokens=5),
            )
            call = at.inference.Generate(asked)
            await call.read()
            await at.run_to_end()
            events = await rest(call)
            ids = [by_choice(events, choice)[0] for choice in range(3)]
            assert ids == [list(b"abcde"), [*b"bcde", EOS], [*b"cde", EOS]]
            ends = finishes(events)
            assert ends[0].reason == pb.FINISH_REASON_LENGTH
            assert [ends[i].stop_token_id for i in (1, 2)] == [EOS, EOS]
            end = events[-1].completed
            assert end.usage == pb.Usage(prompt_tokens=6, completion_tokens=14, cached_tokens=2)
            assert end.num_preemptions == 9
            # Of choice 0 up to its first token; until the last of them ended.
            assert (end.timings.queue_s, end.timings.ttft_s, end.timings.e2e_s) == (0.25, 0.5, 3)
            assert [event.token_delta.HasField("usage") for event in events].count(True) == 0

    asyncio.run(scenario())


def test_an_error_of_one_choice_fails_the_request() -> None:
    async def scenario() -> None:
        async with running() as at:
            call = at.inference.Generate(request(request_id="a", n=3, max_tokens=50))
            await call.read()
            at.engine.step()
            at.engine.errors["a\x1f1"] = "no finite logit"
            at.engine.step()
            await eventually(lambda: ("a", FinishReason.CANCELLED) in at.engine.aborted)
            at.engine.step()
            await eventually(lambda: len(at.server.router) == 0)
            events = await rest(call)
            assert kinds(events)[-1] == "failed"
            assert events[-1].failed.message == "no finite logit"
            assert "finished" not in kinds(events)
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(scenario())


def test_abort_and_cancel_end_all_choices() -> None:
    async def scenario() -> None:
        async with running() as at:
            call = at.inference.Generate(request(request_id="a", n=3, max_tokens=50))
            await call.read()
            at.engine.step(2)
            assert (await at.control.Abort(pb.AbortRequest(request_id="a"))).found
            at.engine.step()
            events = await rest(call)
            ends = finishes(events)
            assert [ends[i].reason for i in range(3)] == [pb.FINISH_REASON_CANCELLED] * 3
            assert events[-1].completed.usage.completion_tokens == 6

            call = at.inference.Generate(request(request_id="a", n=3, max_tokens=50))
            await call.read()
            call.cancel()
            await eventually(lambda: len(at.engine.aborted) == 2)
            at.engine.step()
            await eventually(lambda: len(at.server.router) == 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("n", [0, -1, 129, 10**6, 2**62])
def test_too_many_choices_are_refused_before_anything_is_made(n: int) -> None:
    """Case 11.3."""

    async def scenario() -> None:
        async with running() as at:
            error = await refused(at.inference.Generate(request(n=n)).read())
            assert field_of(error) == "sampling.n"
            assert error.details() == f"n is {n}; it must be in [1, 128]"
            assert at.engine.submitted == []

    asyncio.run(scenario())

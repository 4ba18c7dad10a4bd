"""What comes back of a prompt, and how it is cut: echo, log-probabilities, truncation."""

import asyncio
import math
from typing import Any

import grpc
import pytest

from octavo.engine.request import FinishReason, RequestOutput
from octavo.server import events as event_making
from octavo.server import octavo_pb2 as pb
from octavo.server import prompts

from .fakes import MAX_MODEL_LEN, VOCAB_SIZE
from .harness import Running, eventually, field_of, kinds, refused, rest, running, text


async def answered(at: Running, asked: pb.GenerateRequest) -> list[pb.GenerateEvent]:
    count = len(at.engine.submitted)
    call = at.inference.Generate(asked)
    await eventually(lambda: len(at.engine.submitted) > count)
    await at.run_to_end()
    return await rest(call)


def of_ids(ids: list[int], *, max_tokens: int = 1, **response: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        sampling=pb.Sampling(max_tokens=max_tokens),
        response=pb.ResponseOptions(**response),
    )


def prompt_deltas(events: list[pb.GenerateEvent]) -> list[pb.PromptDelta]:
    return [event.prompt_delta for event in events if event.HasField("prompt_delta")]


def test_the_loglikelihood_request_of_lm_eval() -> None:
    """Ids, echo, log-probabilities with the most likely id, one token of output.

    Everything has the first prompt token as its beginning but log-probabilities, which have none.
    """

    async def scenario() -> None:
        async with running() as at:
            ids = [257, *b"The sea"]
            asked = of_ids(
                ids, echo=True, logprobs=True, prompt_logprobs=True, prompt_top_logprobs=1
            )
            events = await answered(at, asked)
            names = kinds(events)
            assert names == [
                *("accepted", "prompt_delta", "prompt_delta"),
                *("token_delta", "finished", "completed"),
            ]
            echo, numbers = prompt_deltas(events)
            assert list(echo.token_ids) == ids
            assert echo.text == b"The sea"
            assert not echo.logprobs
            assert list(numbers.logprobs) == [-float(i) for i in range(1, 8)]
            tops = [(list(top.token_ids), list(top.logprobs)) for top in numbers.top_logprobs]
            assert tops == [([i], [-float(i)]) for i in range(1, 8)]
            delta = events[3].token_delta
            assert (list(delta.token_ids), list(delta.logprobs)) == ([257], [0])
            assert not delta.top_logprobs
            assert events[-1].completed.usage.completion_tokens == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("prompt", ["añ€😀" * 9, "a"])
@pytest.mark.parametrize("skip", [True, False])
def test_echo_comes_in_parts_of_whole_characters(
    prompt: str, skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_making, "ECHO_TOKENS_PER_EVENT", 4)

    async def scenario() -> None:
        async with running() as at:
            ids = [257, *prompt.encode()]
            events = await answered(at, of_ids(ids, echo=True, skip_special_tokens=skip))
            deltas = prompt_deltas(events)
            assert kinds(events)[1 : 1 + len(deltas)] == ["prompt_delta"] * len(deltas)
            assert [i for delta in deltas for i in delta.token_ids] == ids
            assert max(len(delta.token_ids) for delta in deltas) <= 4
            texts = [delta.text.decode() for delta in deltas]  # raises inside a character
            assert "".join(texts) == ("" if skip else "<257>") + prompt

    asyncio.run(scenario())


def test_a_character_that_the_prompt_leaves_unfinished() -> None:
    """Case 1.1: it is no part of the echo, and output never begins with the prompt's text."""

    async def scenario() -> None:
        async with running() as at:
            events = await answered(at, of_ids([0x61, 0xF0, 0x9F], echo=True))
            assert [delta.text for delta in prompt_deltas(events)] == [b"a"]
            assert text(events) == "a"

    asyncio.run(scenario())


def test_what_is_not_asked_for_does_not_come() -> None:
    async def scenario() -> None:
        async with running() as at:
            events = await answered(at, of_ids([1, 2, 3]))
            assert kinds(events) == ["accepted", "token_delta", "finished", "completed"]
            assert not events[1].token_delta.logprobs
            assert not events[1].token_delta.HasField("usage")
            assert events[0].accepted.truncated_tokens == 0
            # Log-probabilities without their most likely ids, and a prompt that has none.
            events = await answered(at, of_ids([1], prompt_logprobs=True, prompt_top_logprobs=3))
            assert prompt_deltas(events) == []
            (delta,) = prompt_deltas(await answered(at, of_ids([1, 2], prompt_logprobs=True)))
            assert list(delta.logprobs) == [-1]
            assert not delta.top_logprobs

    asyncio.run(scenario())


def test_numbers_on_the_wire_are_finite_whatever_the_engine_brings() -> None:
    """Case 3.5: -inf is no JSON."""
    bad = (-math.inf, -1.0, math.nan, math.inf)
    wanted = [-9999, -1, -9999, 0]

    async def scenario() -> None:
        async with running() as at:
            asked = of_ids([1, 2, 3, 4, 5], max_tokens=9)
            asked.request_id = "a"
            asked.response.MergeFrom(
                pb.ResponseOptions(logprobs=True, top_logprobs=1, prompt_logprobs=True)
            )
            call = at.inference.Generate(asked)
            await call.read()
            at.server.router.on_outputs(
                [
                    RequestOutput(
                        "a",
                        (1, 2, 3, 4),
                        logprobs=bad,
                        prompt_logprobs=bad,
                        finish_reason=FinishReason.LENGTH,
                        top_token_ids=(1, 2, 3, 4),
                        top_logprobs=bad,
                    )
                ]
            )
            events = await rest(call)
            (prompt,) = prompt_deltas(events)
            (delta,) = [event.token_delta for event in events if event.HasField("token_delta")]
            assert list(prompt.logprobs) == wanted
            assert list(delta.logprobs) == wanted
            assert [p for top in delta.top_logprobs for p in top.logprobs] == wanted

    asyncio.run(scenario())


LONG = list(range(100, 200)) * 50  # more than MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("truncation", "sampling", "num_kept", "is_left"),
    [
        ({}, {}, MAX_MODEL_LEN - 1, True),
        ({"max_prompt_tokens": -1}, {"max_tokens": 96}, MAX_MODEL_LEN - 96, True),
        ({"max_prompt_tokens": -1}, {"min_tokens": 5}, MAX_MODEL_LEN - 5, True),
        ({"max_prompt_tokens": 1}, {"max_tokens": 96}, 1, True),
        ({"max_prompt_tokens": 10, "side": pb.TRUNCATION_SIDE_LEFT}, {}, 10, True),
        ({"side": pb.TRUNCATION_SIDE_RIGHT}, {"max_tokens": 1}, MAX_MODEL_LEN - 1, False),
        ({"max_prompt_tokens": MAX_MODEL_LEN - 1}, {"max_tokens": 1}, MAX_MODEL_LEN - 1, True),
    ],
)
@pytest.mark.parametrize("kind", ["token_ids", "text", "chat"])
def test_a_prompt_is_cut_where_it_says(
    truncation: dict[str, Any],
    sampling: dict[str, Any],
    num_kept: int,
    is_left: bool,
    kind: str,
) -> None:
    async def scenario() -> None:
        async with running() as at:
            asked = pb.GenerateRequest(
                truncation=pb.Truncation(**truncation),
                sampling=pb.Sampling(**sampling),
                response=pb.ResponseOptions(echo=True),
            )
            said = "".join(map(chr, [i % 100 + 20 for i in LONG]))
            match kind:
                case "token_ids":
                    ids = LONG
                    asked.token_ids.ids.extend(ids)
                case "text":
                    ids = [257, *said.encode()]
                    asked.text = said
                case _:
                    ids = list(f"<user>{said}".encode())
                    asked.chat.messages.add(role="user", content=said)
            call = at.inference.Generate(asked)
            accepted = (await call.read()).accepted
            kept = ids[-num_kept:] if is_left else ids[:num_kept]
            assert list(at.engine.submitted[0].prompt_token_ids) == kept
            assert accepted.prompt_tokens == num_kept
            assert accepted.truncated_tokens == len(ids) - num_kept
            assert (await call.read()).prompt_delta.token_ids[0] == kept[0]
            call.cancel()

    asyncio.run(scenario())


def test_a_prompt_that_fits_is_left_alone() -> None:
    async def scenario() -> None:
        async with running() as at:
            asked = of_ids([1, 2, 3])
            asked.truncation.max_prompt_tokens = 3
            events = await answered(at, asked)
            assert events[0].accepted.truncated_tokens == 0
            assert at.engine.submitted[0].prompt_token_ids == (1, 2, 3)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("truncation", "sampling", "path", "said"),
    [
        (
            {"max_prompt_tokens": bad},
            {},
            "truncation.max_prompt_tokens",
            f"max_prompt_tokens is {bad}; it must be -1 or in [1, {MAX_MODEL_LEN - 1}]",
        )
        for bad in (0, -2, MAX_MODEL_LEN, 2**62)
    ]
    + [
        (
            {"side": 7},
            {},
            "truncation.side",
            "side is 7; it must be TRUNCATION_SIDE_LEFT or TRUNCATION_SIDE_RIGHT",
        ),
        # What is left never excuses a max_tokens that cannot be.
        ({}, {"max_tokens": 0}, "sampling.max_tokens", "max_tokens is 0; it must be in [1, "),
        ({}, {"max_tokens": 2**62}, "sampling.max_tokens", "max_tokens is 4611686018427387904"),
        (
            {"max_prompt_tokens": MAX_MODEL_LEN - 1},
            {"max_tokens": 2},
            "sampling.max_tokens",
            "max_tokens is 2; it must be in [1, 1]",
        ),
    ],
)
def test_truncation_out_of_bounds_is_named(
    truncation: dict[str, Any], sampling: dict[str, Any], path: str, said: str
) -> None:
    async def scenario() -> None:
        async with running() as at:
            asked = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=LONG),
                truncation=pb.Truncation(**truncation),
                sampling=pb.Sampling(**sampling),
            )
            error = await refused(at.inference.Generate(asked).read())
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field_of(error) == path
            assert str(error.details()).startswith(said)

    asyncio.run(scenario())


def test_ids_that_are_cut_off_are_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And there is a bound to how many those may be."""

    async def scenario() -> None:
        async with running() as at:
            for bad in (-1, VOCAB_SIZE, 2**40):
                asked = of_ids([1, bad, *LONG])
                asked.truncation.SetInParent()
                error = await refused(at.inference.Generate(asked).read())
                assert field_of(error) == "token_ids"
                assert str(error.details()).startswith(f"token_ids[1] is {bad}; it must be")
            monkeypatch.setattr(prompts, "MAX_TRUNCATED_IDS", 4999)
            asked = of_ids(LONG)
            asked.truncation.SetInParent()
            error = await refused(at.inference.Generate(asked).read())
            assert field_of(error) == "token_ids"
            assert "it must have at most 4999 to be truncated" in str(error.details())

    asyncio.run(scenario())

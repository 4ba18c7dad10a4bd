"""Kind 1.1: text at the border of prompt and output, with the detokenizer that real models have.

Tokens are single bytes, so that prompts end inside characters. The fake engine repeats the prompt:
choice c begins c tokens further on.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, override

import pytest

from octavo.models.detokenizer import IncrementalDetokenizer
from octavo.server import octavo_pb2 as pb

from .fakes import ByteCodec
from .harness import eventually, rest, running


class ByteTokens:
    special_token_ids = frozenset({256, 257})
    drops_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


class RealText(ByteCodec):
    """As ByteCodec, but text is made as for a real model."""

    @override
    def stream_decoder(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Any:
        return IncrementalDetokenizer(
            ByteTokens(), prompt_ids, skip_special_tokens=skip_special_tokens
        )


async def texts(prompt: bytes, *, echo: bool, reads_late: bool, **sampling: object) -> list[str]:
    """The echo, and the text of each choice; each event's text is one of whole characters."""
    async with running(model_facts={"codec": RealText()}) as at:
        asked = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.Sampling(**sampling),
            response=pb.ResponseOptions(echo=echo),
        )
        call = at.inference.Generate(asked)
        await eventually(lambda: bool(at.engine.submitted))
        while at.engine.load().num_running:
            at.engine.step()
            await asyncio.sleep(0 if reads_late else 0.002)
        events = await rest(call)
        found = [""] * (1 + asked.sampling.n)
        for event in events:
            if event.HasField("prompt_delta"):
                found[0] += event.prompt_delta.text.decode()
            if event.HasField("token_delta"):
                found[1 + event.token_delta.index] += event.token_delta.text.decode()
        assert events[-1].completed.usage.completion_tokens == (
            asked.sampling.n * asked.sampling.max_tokens
        )
        return found


@pytest.mark.parametrize("reads_late", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("choice", [0, 1])
@pytest.mark.parametrize("split", [1, 2, 3])
def test_the_character_that_lies_across_comes_once_and_the_prompt_never(
    split: int, choice: int, echo: bool, reads_late: bool
) -> None:
    """Fails if a choice's decoder does not know the prompt, or gives the prompt's text with it."""
    character = "😀".encode()
    # This choice goes on with the rest of the prompt's last character.
    prompt = b"x" * choice + character[split:] + b" said it " + character[:split]

    async def scenario() -> None:
        found = await texts(prompt, echo=echo, reads_late=reads_late, n=2, max_tokens=9 - split)
        assert found[0] == (prompt[:-split].decode(errors="replace") if echo else "")
        assert found[1 + choice] == "😀 said"
        if choice == 1:
            assert found[1] == prompt[: 9 - split].decode(errors="replace")

    asyncio.run(scenario())


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_an_output_that_ends_inside_its_first_character(max_tokens: int) -> None:
    """Kind 1.5: valid UTF-8 at every cut, and each token is counted."""

    async def scenario() -> None:
        found = await texts("😀".encode(), echo=False, reads_late=False, n=1, max_tokens=max_tokens)
        assert found[1] == ("😀" if max_tokens == 4 else "\ufffd")

    asyncio.run(scenario())


def test_a_stop_id_inside_a_character() -> None:
    """Kind 1.5: the id that stops is a byte in the middle; it is counted and sent."""

    async def scenario() -> None:
        async with running(model_facts={"codec": RealText()}) as at:
            first, second, *_ = "😀".encode()
            asked = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[*b"ok", *"😀".encode()]),
                sampling=pb.Sampling(max_tokens=20, stop_token_ids=[second]),
            )
            call = at.inference.Generate(asked)
            await eventually(lambda: bool(at.engine.submitted))
            await at.run_to_end()
            events = await rest(call)
            deltas = [event.token_delta for event in events]
            assert [i for delta in deltas for i in delta.token_ids] == [*b"ok", first, second]
            assert b"".join(delta.text for delta in deltas).decode() == "ok\ufffd"
            assert events[-2].finished.stop_token_id == second
            assert events[-1].completed.usage.completion_tokens == 4

    asyncio.run(scenario())


def test_family_emoji_cut_between_its_code_points() -> None:
    """Kind 1.5: what is text on its own is sent as it is, with no mark and nothing held back."""
    family = "👩\u200d👩"

    async def scenario() -> None:
        for length, wanted in ((4, "👩"), (7, "👩\u200d"), (11, family)):
            found = await texts(
                family.encode(), echo=False, reads_late=False, n=1, max_tokens=length
            )
            assert found[1] == wanted

    asyncio.run(scenario())

"""Tokenize and Detokenize, end to end over a real port."""

import asyncio

from octavo.server import octavo_pb2 as pb
from octavo.server.prompts import MAX_DETOKENIZE_IDS

from .fakes import EOS, VOCAB_SIZE
from .harness import field_of, refused, running


def test_control_tokens_in_text_are_text_unless_asked_for() -> None:
    async def scenario() -> None:
        async with running() as at:
            asked = pb.TokenizeRequest(text="a<256>", add_special_tokens=False)
            assert bytes((await at.inference.Tokenize(asked)).token_ids) == b"a<256>"
            asked.parse_special_tokens = True
            assert list((await at.inference.Tokenize(asked)).token_ids) == [97, EOS]

    asyncio.run(scenario())


def test_tokenize_and_detokenize_are_inverse() -> None:
    async def scenario() -> None:
        async with running() as at:
            long = "añ€😀" * 1000  # beyond INLINE_BYTES, so tokenised in a thread
            for content in ("hé", long):
                answer = await at.inference.Tokenize(pb.TokenizeRequest(text=content))
                assert list(answer.token_ids) == [257, *content.encode()]
                back = await at.inference.Detokenize(
                    pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=answer.token_ids))
                )
                assert back.text == content
            for bad in (-1, VOCAB_SIZE):
                error = await refused(
                    at.inference.Detokenize(pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[bad])))
                )
                assert field_of(error) == "token_ids"

    asyncio.run(scenario())


def test_detokenize_refuses_more_ids_than_it_is_worth_looking_at() -> None:
    async def scenario() -> None:
        async with running() as at:
            ids = pb.TokenIds(ids=[97] * (MAX_DETOKENIZE_IDS + 1))
            error = await refused(at.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids)))
            assert field_of(error) == "token_ids"
            del ids.ids[0]
            answer = await at.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids))
            assert answer.text == "a" * MAX_DETOKENIZE_IDS

    asyncio.run(scenario())

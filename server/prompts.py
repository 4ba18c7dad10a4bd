"""The three forms of a prompt on the wire (text, ids, chat) to token ids."""

import asyncio
import re
from collections.abc import Callable, Sequence

from . import octavo_pb2 as pb
from .served_model import ServedModel
from .status import invalid
from .unknown_fields import refuse_unknown_fields

INLINE_BYTES = 2048
"""Longer requests are tokenised in a thread. At a few characters per microsecond, this many hold up
no other stream for long. It is the size of the whole request that counts: a chat of a hundred
thousand empty messages takes seconds too."""


MAX_TEXT_BYTES = 1 << 20
"""Text and chats are tokenised before their length in tokens is known, so bytes bound the work."""

MAX_DETOKENIZE_IDS = 1 << 18
"""Ids are looked at one by one, and each may stand for many bytes. That many are about a MiB."""

MAX_TRUNCATED_IDS = MAX_DETOKENIZE_IDS
"""Of a prompt that asks to be truncated; ids that are cut off are looked at too."""


async def prompt_token_ids(
    request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel
) -> list[int]:
    """The ids of the request's input, whichever form it has.

    Raises:
      Refusal: No input, more ids than can be, a text or chat over MAX_TEXT_BYTES, an
        option that does not go with the input, a text that the vocabulary cannot spell, or a chat
        that the model has no template for or its template refuses.
    """
    kind = request.WhichOneof("input")
    if kind is None:
        raise invalid("input", "the request has no input; give text, token_ids or chat")
    for option in ("add_special_tokens", "parse_special_tokens"):
        if kind != "text" and request.HasField(option):
            raise invalid(option, f"{option} goes with text, not with {kind}")
    if isinstance(request, pb.GenerateRequest) and kind == "token_ids":
        return await _given_ids(request, model)
    if kind != "token_ids" and request.ByteSize() > MAX_TEXT_BYTES:
        raise invalid(
            kind,
            f"{kind} makes the request {request.ByteSize()} bytes long; it must be at most "
            f"{MAX_TEXT_BYTES}",
        )
    if kind == "text":
        return await _text_ids(request, model)
    return await _chat_ids(request, model)


async def _given_ids(request: pb.GenerateRequest, model: ServedModel) -> list[int]:
    # Sixteen MiB hold many millions of ids: look at the count before touching each.
    given = request.token_ids.ids
    if not request.HasField("truncation"):
        if len(given) >= model.max_model_len:
            raise invalid(
                "token_ids",
                f"token_ids has {len(given)} ids; it must have fewer than max_model_len, "
                f"{model.max_model_len}, to leave room for output",
            )
        return list(given)
    if len(given) > MAX_TRUNCATED_IDS:
        raise invalid(
            "token_ids",
            f"token_ids has {len(given)} ids; it must have at most {MAX_TRUNCATED_IDS} to be "
            "truncated",
        )
    # Those that will be cut off are checked here; the engine sees only what is left.
    return await _off_loop_if_long(request, lambda: _checked_ids(given, model.vocab_size))


def _checked_ids(given: Sequence[int], vocab_size: int) -> list[int]:
    token_ids = list(given)
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise invalid(
                "token_ids",
                f"token_ids[{index}] is {token_id}; it must be a token id in [0, {vocab_size})",
            )
    return token_ids


async def _text_ids(
    request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel
) -> list[int]:
    text, parse = request.text, request.parse_special_tokens
    add = request.add_special_tokens if request.HasField("add_special_tokens") else True
    try:
        return await _off_loop_if_long(
            request,
            lambda: model.codec.encode(text, add_special_tokens=add, parse_special_tokens=parse),
        )
    except ValueError as error:
        raise invalid("text", str(error)) from error


async def _chat_ids(
    request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel
) -> list[int]:
    if not model.codec.has_chat_template:
        raise invalid("chat", f"model {model.name} has no chat template; give text or token_ids")
    messages = request.chat.messages
    if not messages:
        raise invalid("chat.messages", "chat.messages is empty; it must have at least 1 message")

    def encode() -> list[int]:
        for index, each in enumerate(messages):
            refuse_unknown_fields(each, f"chat.messages[{index}]")
        return model.codec.encode_chat([(each.role, each.content) for each in messages])

    try:
        return await _off_loop_if_long(request, encode)
    except ValueError as error:
        # What the template says of a message begins with its path from the messages on.
        message = str(error)
        found = re.match(r"messages(\[\d+\](\.\w+)?)?(?= )", message)
        if found is None:
            raise invalid("chat.messages", message) from error
        raise invalid(f"chat.{found[0]}", f"chat.{message}") from error


async def _off_loop_if_long(
    request: pb.GenerateRequest | pb.TokenizeRequest, encode: Callable[[], list[int]]
) -> list[int]:
    if request.ByteSize() <= INLINE_BYTES:
        return encode()
    return await asyncio.to_thread(encode)

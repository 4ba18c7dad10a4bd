"""What this server's interface does not have is refused, wherever in a request it lies.

protobuf parses such fields and says nothing, so without a check a newer client's option, or one
sent as another type, would count for nothing.
"""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import Descriptor

from octavo.server import octavo_pb2 as pb

from .harness import field_of, refused, running

UNKNOWN_NUMBER = 99
FIXED32 = 5  # a wire type that no field of a request has
LENGTH_DELIMITED = 2


def tag(number: int, wire_type: int) -> bytes:
    key = number << 3 | wire_type
    return bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])


def strangers(kind: Descriptor, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Each message of this kind with one field that does not belong, and the path of that."""
    yield f"{path}{UNKNOWN_NUMBER}", tag(UNKNOWN_NUMBER, FIXED32) + bytes(4)
    for field in kind.fields:
        yield f"{path}{field.name}", tag(field.number, FIXED32) + bytes(4)
        nested = field.message_type
        if nested is None:
            continue
        if nested.GetOptions().map_entry:
            entry = tag(nested.fields_by_name["value"].number, FIXED32) + bytes(4)
            yield f"{path}{field.name}", tag(field.number, LENGTH_DELIMITED) + bytes([5]) + entry
            continue
        index = "[0]" if field.is_repeated else ""
        for inside, raw in strangers(nested, f"{path}{field.name}{index}."):
            yield inside, tag(field.number, LENGTH_DELIMITED) + bytes([len(raw)]) + raw


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("Generate", pb.GenerateRequest.DESCRIPTOR),
        ("Tokenize", pb.TokenizeRequest.DESCRIPTOR),
        ("Detokenize", pb.DetokenizeRequest.DESCRIPTOR),
    ],
)
def test_what_the_interface_does_not_have_is_refused(method: str, kind: Descriptor) -> None:
    """Fails if a message anywhere in a request is not looked at."""

    async def scenario() -> None:
        async with running() as at:
            cases = list(strangers(kind))
            assert len(cases) > len(kind.fields)
            for path, raw in cases:
                name = f"/octavo.v1.Inference/{method}"
                if method == "Generate":
                    error = await refused(at.channel.unary_stream(name)(raw).read())
                else:
                    error = await refused(at.channel.unary_unary(name)(raw))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, path
                assert field_of(error) == path
                assert "in the interface that this server has" in str(error.details())
            assert at.engine.submitted == []
            assert len(at.server.router) == 0

    asyncio.run(scenario())


def test_every_message_of_a_request_is_among_them() -> None:
    """Of a kind that is not, the test above would miss nothing."""
    paths = {path for path, _ in strangers(pb.GenerateRequest.DESCRIPTOR)}
    assert {
        "99",
        "sampling.99",
        "sampling.temperature",
        "sampling.logit_bias",
        "sampling.guide.choice.99",
        "chat.messages[0].99",
    } <= paths

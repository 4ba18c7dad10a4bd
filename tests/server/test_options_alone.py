"""No option is accepted and ignored: set alone, each does something or is refused by its name."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor

from octavo.engine.request import Request
from octavo.engine.sampling_params import Guide
from octavo.server import octavo_pb2 as pb

from .fakes import EOS
from .harness import eventually, field_of, rest, running

BASES = {
    "ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[257, *b"stop", EOS])),
    "long ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[*range(250)] * 20), truncation={}),
    "text": pb.GenerateRequest(text="a<256>b"),
}
for _base in BASES.values():
    _base.request_id = "a"
    _base.sampling.max_tokens = 9

# A value that is not the default, and what it is set in if not in the first base.
ALONE: dict[str, tuple[Any, str]] = {
    "request_id": ("b", "ids"),
    "model": ("other", "ids"),
    "tenant": ("t", "ids"),
    "add_special_tokens": (False, "text"),
    "parse_special_tokens": (True, "text"),
    "sampling.max_tokens": (2, "ids"),
    "sampling.temperature": (0.0, "ids"),
    "sampling.top_k": (2, "ids"),
    "sampling.top_p": (0.5, "ids"),
    "sampling.min_p": (0.5, "ids"),
    "sampling.seed": (0, "ids"),
    "sampling.ignore_eos": (True, "ids"),
    "sampling.stop_token_ids": ([ord("t")], "ids"),
    "sampling.repetition_penalty": (1.5, "ids"),
    "sampling.frequency_penalty": (0.5, "ids"),
    "sampling.presence_penalty": (0.5, "ids"),
    "sampling.logit_bias": ({5: 1.0}, "ids"),
    "sampling.allowed_token_ids": ({"ids": [5, EOS]}, "ids"),
    "sampling.banned_token_ids": ([5], "ids"),
    "sampling.min_tokens": (2, "ids"),
    "sampling.n": (2, "ids"),
    "sampling.stop": (["to"], "ids"),
    "sampling.include_stop": (True, "ids"),
    "sampling.guide.json_schema": ("{}", "ids"),
    "sampling.guide.json_object": (True, "ids"),
    "sampling.guide.regex": ("a", "ids"),
    "sampling.guide.choice": ({"texts": ["a"]}, "ids"),
    "sampling.guide.grammar": ('start: "a"', "ids"),
    "response.logprobs": (True, "ids"),
    "response.prompt_logprobs": (True, "ids"),
    "response.skip_special_tokens": (False, "ids"),
    "response.top_logprobs": (1, "ids"),
    "response.prompt_top_logprobs": (1, "ids"),
    "response.echo": (True, "ids"),
    "response.continuous_usage": (True, "ids"),
    "scheduling.priority": (1, "ids"),
    "scheduling.request_class": ("chat", "ids"),
    "scheduling.ttft_target_ms": (5.0, "ids"),
    "scheduling.tpot_target_ms": (5.0, "ids"),
    "scheduling.queue_ttl_ms": (5.0, "ids"),
    "kv.cache_salt": ("s", "ids"),
    "kv.bypass_prefix_cache": (True, "ids"),
    "truncation.max_prompt_tokens": (2, "long ids"),
    "truncation.side": (pb.TRUNCATION_SIDE_RIGHT, "long ids"),
}
REFUSED_ALONE = {
    "model",
    "sampling.include_stop",
    "response.top_logprobs",
    "response.prompt_top_logprobs",
}


def paths(message: Descriptor, prefix: str = "") -> list[str]:
    """Of all options; the input itself is none, and lists of ids or texts are one."""
    found: list[str] = []
    for field in message.fields:
        oneof = field.containing_oneof
        if oneof is not None and oneof.name == "input":
            continue
        kind = field.message_type
        if kind is None or field.is_repeated or kind.name in ("TokenIds", "Choices"):
            found.append(prefix + field.name)
        else:
            found += paths(kind, f"{prefix}{field.name}.")
    return found


def test_the_table_holds_every_option() -> None:
    """Fails when one is added to the proto and not here."""
    assert sorted(ALONE) == sorted(paths(pb.GenerateRequest.DESCRIPTOR))


def asked_with(path: str, value: Any, base: pb.GenerateRequest) -> pb.GenerateRequest:
    """The base with one more field."""
    *parents, name = path.split(".")
    fields: dict[str, Any] = {name: value}
    for parent in reversed(parents):
        fields = {parent: fields}
    asked = pb.GenerateRequest()
    asked.CopyFrom(base)
    asked.MergeFrom(pb.GenerateRequest(**fields))
    return asked


def any_guide(guide: Guide) -> None:
    """Takes it."""


async def outcome(asked: pb.GenerateRequest) -> tuple[Request, list[pb.GenerateEvent]] | str:
    """What the engine got and what came back, or the field that the refusal names."""
    facts = {"check_guide": any_guide}
    async with running(tokens_per_step=99, clock=lambda: 0.0, model_facts=facts) as at:
        call = at.inference.Generate(asked)
        try:
            events = [await call.read()]
        except grpc.aio.AioRpcError as error:
            assert at.engine.submitted == []
            return field_of(error)
        await eventually(lambda: bool(at.engine.submitted))
        await at.run_to_end()
        events += await rest(call)
        return at.engine.submitted[0], events


@pytest.mark.parametrize("path", ALONE)
def test_an_option_alone_does_something_or_is_refused(path: str) -> None:
    """Fails if one is dropped on its way, or taken where it has nothing to be about."""
    value, base = ALONE[path]

    async def scenario() -> None:
        without = await outcome(BASES[base])
        got = await outcome(asked_with(path, value, BASES[base]))
        assert not isinstance(without, str)
        assert without == await outcome(BASES[base]), "differences say nothing"
        if path in REFUSED_ALONE:
            assert got == path
        else:
            assert not isinstance(got, str), got
            assert got != without

    asyncio.run(scenario())

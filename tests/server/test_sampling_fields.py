"""Sampling, ResponseOptions and Guide on the wire: honoured or refused by name, and bounded."""

import asyncio
import json
import math
import threading
from typing import Any

import grpc
import pytest

from octavo.engine.refusals import InvalidRequest
from octavo.engine.sampling_params import Guide, GuideKind, SamplingParams
from octavo.server import octavo_pb2 as pb
from octavo.server.conversion import invalid_field, sampling_params

from ..engine.byte_guides import byte_guides
from .fakes import VOCAB_SIZE
from .harness import Running, eventually, field_of, refused, request, running

NAN = math.nan


async def submitted(at: Running, asked: pb.GenerateRequest) -> SamplingParams:
    """What reaches the engine of a request, which is cancelled."""
    count = len(at.engine.submitted)
    call = at.inference.Generate(asked)
    await eventually(lambda: len(at.engine.submitted) > count)
    call.cancel()
    return at.engine.submitted[-1].sampling


# Called alike on the wire and in the engine.
SCALARS: dict[str, Any] = {
    "max_tokens": 7,
    "min_tokens": 3,
    "temperature": 0.5,
    "top_k": 11,
    "top_p": 0.75,
    "min_p": 0.25,
    "seed": 2**64 - 1,
    "ignore_eos": True,
    "repetition_penalty": 1.5,
    "frequency_penalty": -0.5,
    "presence_penalty": 0.25,
    "n": 4,
}
REPORTS: dict[str, Any] = {
    "logprobs": True,
    "top_logprobs": 5,
    "prompt_logprobs": True,
    "prompt_top_logprobs": 2,
}
EVERYTHING = pb.GenerateRequest(
    text="hello",
    sampling=pb.Sampling(
        **SCALARS,
        stop_token_ids=[5, 6],
        logit_bias={9: 1.5, 3: -100.0},
        allowed_token_ids=pb.TokenIds(ids=[1, 2, 9]),
        banned_token_ids=[2],
        stop=["end"],
        include_stop=True,
    ),
    response=pb.ResponseOptions(
        **REPORTS, skip_special_tokens=False, echo=True, continuous_usage=True
    ),
)


def test_every_field_reaches_the_engine() -> None:
    async def scenario() -> None:
        async with running() as at:
            assert await submitted(at, EVERYTHING) == SamplingParams(
                **SCALARS,
                **REPORTS,
                stop_token_ids=(5, 6),
                logit_bias=((3, -100.0), (9, 1.5)),
                allowed_token_ids=(1, 2, 9),
                banned_token_ids=(2,),
            )

    asyncio.run(scenario())


def test_no_field_is_forgotten() -> None:
    """Fails when a field is added to the proto and to no test; and if one were silently ignored."""
    for message, elsewhere in (
        (EVERYTHING.sampling, {"guide", "stop", "include_stop"}),
        (EVERYTHING.response, {"skip_special_tokens", "echo", "continuous_usage"}),
    ):
        for field in message.DESCRIPTOR.fields:
            is_set = any(found == field for found, _ in message.ListFields())
            assert is_set or field.name == "guide", field.name
            if field.name in elsewhere:  # the front end's own
                continue
            value = getattr(message, field.name)
            if message is EVERYTHING.sampling:
                got = sampling_params(pb.Sampling(**{field.name: value}), pb.ResponseOptions())
            else:
                got = sampling_params(pb.Sampling(), pb.ResponseOptions(**{field.name: value}))
            assert got != SamplingParams(), field.name


def test_absent_is_the_default_and_zero_is_zero() -> None:
    assert sampling_params(pb.Sampling(), pb.ResponseOptions()) == SamplingParams()
    empty = sampling_params(
        pb.Sampling(repetition_penalty=0, n=0, allowed_token_ids=pb.TokenIds()),
        pb.ResponseOptions(),
    )
    assert (empty.repetition_penalty, empty.n, empty.allowed_token_ids) == (0, 0, ())


BAD_FIELDS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *[({"repetition_penalty": bad}, {}, "sampling.repetition_penalty") for bad in (NAN, 0, 101)],
    *[
        ({name: bad}, {}, f"sampling.{name}")
        for name in ("frequency_penalty", "presence_penalty")
        for bad in (NAN, math.inf, 2.1, -2.1)
    ],
    *[({"logit_bias": {1: bad}}, {}, "sampling.logit_bias[1]") for bad in (NAN, math.inf, -101)],
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, {}, "sampling.logit_bias"),
    ({"logit_bias": {-1: 1.0}}, {}, "sampling.logit_bias"),
    ({"allowed_token_ids": pb.TokenIds()}, {}, "sampling.allowed_token_ids"),
    ({"allowed_token_ids": pb.TokenIds(ids=[2**32 + 5])}, {}, "sampling.allowed_token_ids"),
    ({"banned_token_ids": [-1]}, {}, "sampling.banned_token_ids"),
    ({"banned_token_ids": list(range(VOCAB_SIZE))}, {}, "sampling.banned_token_ids"),
    ({"min_tokens": -1}, {}, "sampling.min_tokens"),
    ({"min_tokens": 6}, {}, "sampling.min_tokens"),
    ({"include_stop": True}, {}, "sampling.include_stop"),
    ({}, {"top_logprobs": 1}, "response.top_logprobs"),
    ({}, {"prompt_top_logprobs": 1}, "response.prompt_top_logprobs"),
    # Case 11.3: caps are on the number, however it is spelled.
    *[
        ({}, {"logprobs": True, "top_logprobs": bad}, "response.top_logprobs")
        for bad in (-1, 21, VOCAB_SIZE, 2**62)
    ],
    *[
        ({}, {"prompt_logprobs": True, "prompt_top_logprobs": bad}, "response.prompt_top_logprobs")
        for bad in (-1, 21, VOCAB_SIZE - 1)
    ],
]


def test_bad_fields_are_named() -> None:
    async def scenario() -> None:
        async with running() as at:
            for sampling, response, path in BAD_FIELDS:
                asked = request(**sampling)
                asked.response.MergeFrom(pb.ResponseOptions(**response))
                error = await refused(at.inference.Generate(asked).read())
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, sampling
                assert field_of(error) == path
                assert str(error.details()).startswith(path.split(".")[1])
            assert at.engine.submitted == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("stop_token_ids", VOCAB_SIZE),
        ("banned_token_ids", VOCAB_SIZE),
        ("allowed_token_ids", VOCAB_SIZE),
        ("logit_bias", 300),
    ],
)
def test_lists_are_counted_before_they_are_read(name: str, most: int) -> None:
    """Case 11.3: sixteen MiB hold millions of ids. Fails if each is looked at to refuse them."""
    ids = list(range(10**9, 10**9 + most + 1))  # none of which is in the vocabulary
    kinds: dict[str, Any] = {
        "allowed_token_ids": pb.TokenIds(ids=ids),
        "logit_bias": dict.fromkeys(ids, 1.0),
    }

    async def scenario() -> None:
        async with running() as at:
            error = await refused(
                at.inference.Generate(request(**{name: kinds.get(name, ids)})).read()
            )
            assert field_of(error) == f"sampling.{name}"
            assert error.details() == f"{name} has {most + 1} ids; it must have at most {most}"

    asyncio.run(scenario())


GUIDES = [
    (pb.Guide(json_schema='{"type": "object"}'), GuideKind.JSON_SCHEMA, '{"type": "object"}'),
    (pb.Guide(json_object=True), GuideKind.JSON_OBJECT, ""),
    (pb.Guide(regex="a+é"), GuideKind.REGEX, "a+é"),
    (pb.Guide(choice=pb.Choices(texts=["é", '"'])), GuideKind.CHOICE, '["é", "\\""]'),
    (pb.Guide(grammar='start: "a"'), GuideKind.GRAMMAR, 'start: "a"'),
]


@pytest.mark.parametrize(("guide", "kind", "text"), GUIDES, ids=lambda each: str(each)[:12])
def test_guides_are_compiled_off_the_loop_and_then_reach_the_engine(
    guide: pb.Guide, kind: GuideKind, text: str
) -> None:
    checked: list[Guide] = []

    def check(record: Guide) -> None:
        assert threading.current_thread() is not threading.main_thread()
        checked.append(record)

    async def scenario() -> None:
        async with running(model_facts={"check_guide": check}) as at:
            got = await submitted(at, request(guide=guide))
            assert got.guide == Guide(kind=kind, text=text)
            assert checked == [got.guide]
            info = await at.control.GetModelInfo(pb.GetModelInfoRequest())
            assert info.has_guides

    asyncio.run(scenario())


def test_a_guide_that_cannot_be_is_refused_with_the_reason() -> None:
    def check(record: Guide) -> None:
        raise ValueError("unsupported: lookahead")

    async def scenario() -> None:
        async with running(model_facts={"check_guide": check}) as at:
            for guide, kind, _ in GUIDES:
                error = await refused(at.inference.Generate(request(guide=guide)).read())
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert field_of(error) == f"sampling.guide.{kind.value}"
                details = str(error.details())
                assert details.startswith(f"{kind.value} is ")
                assert details.endswith("unsupported: lookahead")
            assert at.engine.submitted == []
            assert len(at.server.router) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("num_texts", [0, 1001])
def test_too_many_or_no_choices_are_refused_with_count_and_bound(num_texts: int) -> None:
    """However long the message is: it shows the beginning and the end."""

    async def scenario() -> None:
        async with running(model_facts={"check_guide": byte_guides().check}) as at:
            guide = pb.Guide(choice=pb.Choices(texts=["a" * 200] * num_texts))
            error = await refused(at.inference.Generate(request(guide=guide)).read())
            assert field_of(error) == "sampling.guide.choice"
            details = str(error.details())
            assert details.endswith(f"are {num_texts} texts; they must be 1 to 1000")
            assert at.engine.submitted == []

    asyncio.run(scenario())


def test_a_server_without_guides_says_so() -> None:
    async def scenario() -> None:
        async with running() as at:
            error = await refused(at.inference.Generate(request(guide=pb.Guide(regex="a"))).read())
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field_of(error) == "sampling.guide.regex"
            assert error.details() == "regex is a guide; this server takes none"
            info = await at.control.GetModelInfo(pb.GetModelInfoRequest())
            assert not info.has_guides

    asyncio.run(scenario())


BAD_GUIDES: list[tuple[pb.Guide, dict[str, Any], str, str]] = [
    (pb.Guide(), {}, "guide", "guide is empty; it must have one of json_schema, json_object"),
    (pb.Guide(json_object=False), {}, "guide.json_object", "json_object is false; it must be true"),
    (
        pb.Guide(regex="a" * 262_145),
        {},
        "guide.regex",
        "regex is 262145; it must be at most 262144 characters long",
    ),
    (pb.Guide(regex="a"), {"ignore_eos": True}, "ignore_eos", "ignore_eos is True; it must be"),
]


def test_bad_guides_are_named_and_not_compiled() -> None:
    """Case 11.3. Fails if a guide is compiled before its length is known to be within bounds."""

    def check(record: Guide) -> None:
        raise AssertionError("compiled")

    async def scenario() -> None:
        async with running(model_facts={"check_guide": check}) as at:
            for guide, sampling, path, said in BAD_GUIDES:
                asked = request(guide=guide, **sampling)
                error = await refused(at.inference.Generate(asked).read())
                assert field_of(error) == f"sampling.{path}"
                assert str(error.details()).startswith(said)
            assert at.engine.submitted == []

    asyncio.run(scenario())


def test_choices_are_counted_in_characters() -> None:
    """As JSON with escapes an é would count six."""
    texts = ["é" * 1000] * 200
    guide = sampling_params(
        pb.Sampling(guide=pb.Guide(choice=pb.Choices(texts=texts))), pb.ResponseOptions()
    ).guide
    assert guide is not None
    assert json.loads(guide.text) == texts
    assert len(guide.text) < 262_144


def test_a_field_without_a_place_on_the_wire_keeps_its_name() -> None:
    error = InvalidRequest("prompt_embeds", 1, "2")
    assert invalid_field(error, pb.GenerateRequest()).field == "prompt_embeds"


def test_the_fingerprint_is_in_accepted_and_in_the_models_facts() -> None:
    async def scenario() -> None:
        async with running(model_facts={"fingerprint": "f00d"}) as at:
            call = at.inference.Generate(request())
            assert (await call.read()).accepted.fingerprint == "f00d"
            info = await at.control.GetModelInfo(pb.GetModelInfoRequest())
            assert info.fingerprint == "f00d"
            call.cancel()

    asyncio.run(scenario())

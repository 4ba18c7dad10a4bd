"""Many requests over real gRPC to a real engine with a tiny model, and what must hold after.

Would fail if a stream broke off or lost, repeated or reordered an event, if a page, slot or stream
leaked, if anything compiled after READY, if usage was not what was streamed, if an output held what
its request ruled out, or if a request changed because others ran beside it.
"""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest

from octavo.server import octavo_pb2 as pb
from octavo.server import octavo_pb2_grpc
from tests.engine.conftest import TINY_ENGINE
from tests.models.tiny_checkpoints import EOS_TOKEN, random_tensors, tiny_config, write_huggingface

from .harness import rest
from .real_server import serving

CONCURRENCY = 48  # some wait for a slot, and pages run out
MAX_MODEL_LEN = 211
assert TINY_ENGINE.max_model_len == MAX_MODEL_LEN


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = tiny_config(max_position=1024)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_huggingface(folder, config, random_tensors(config), dtype=np.float32)
    with serving(folder) as at:
        yield at


# What the model may be held to; its tokens are bytes, so every text can be spelled.
GUIDES = [
    pb.Guide(regex="[ab]{1,12}"),
    pb.Guide(choice=pb.Choices(texts=["yes", "nö"])),
    pb.Guide(json_schema='{"type": "object", "properties": {"a": {"enum": [1, 2]}}}'),
    pb.Guide(grammar='start: "x" "y"+ "z"'),
]

STOPS: list[list[str]] = [[], [], ["a"], ["\ufffd\ufffd", "e", "never in a million years"]]


def draw_request(draw: random.Random, vocab_size: int) -> pb.GenerateRequest:
    """Any legal request; None of a pair of choices leaves the field unset."""
    prompt_len = draw.choice([1, 2, draw.randint(1, 100), MAX_MODEL_LEN - 1])
    truncation = draw.choice([None, None, None, pb.Truncation(), draw_truncation(draw)])
    most = MAX_MODEL_LEN - num_kept(prompt_len, truncation)
    guide = draw.choice([None, None, None, draw.choice(GUIDES)])
    max_tokens = draw.choice([None, 1, draw.randint(1, most), most])
    if truncation is not None and truncation.max_prompt_tokens <= 0:
        max_tokens = draw.choice([None, 1])  # else more of the prompt is cut
    stop = draw.choice(STOPS)
    sampling = pb.Sampling(
        max_tokens=max_tokens,
        temperature=draw.choice([None, 0, 1e-6, 0.7, 1.5, 100]),
        top_k=draw.choice([None, -1, 0, 1, 7, vocab_size, 2**31 - 1]),
        top_p=draw.choice([None, 1e-50, 0.3, 0.95, 1]),
        min_p=draw.choice([None, 0, 0.2, 1]),
        seed=draw.choice([None, 0, 2**64 - 1, draw.getrandbits(64)]),
        ignore_eos=None if guide else draw.choice([None, False, True]),
        stop_token_ids=[] if guide else draw.sample(range(vocab_size), draw.choice([0, 0, 3])),
        repetition_penalty=draw.choice([None, None, 0.01, 1.3, 100]),
        frequency_penalty=draw.choice([None, None, -2, 0.5]),
        presence_penalty=draw.choice([None, None, 2]),
        logit_bias={
            draw.randrange(vocab_size): draw.choice([-100, 0, 5, 100])
            for _ in range(draw.choice([0, 0, 1, 300]))
        },
        banned_token_ids=draw.sample(range(256), draw.choice([0, 0, 3])) if not guide else [],
        min_tokens=draw.choice([None, None, 0, min(5, most)]) if max_tokens is None else None,
        n=draw.choice([None, None, 1, 2, 3]),
        stop=stop,
        include_stop=draw.choice([None, True]) if stop else None,
        guide=guide,
    )
    if guide is None and draw.random() < 0.2:
        sampling.allowed_token_ids.ids.extend(draw.sample(range(vocab_size), 100))
        del sampling.banned_token_ids[:]
    has_logprobs, has_prompt_logprobs = draw.choice([None, True]), draw.choice([None, True])
    response = pb.ResponseOptions(
        logprobs=has_logprobs,
        top_logprobs=draw.choice([None, 1, 20]) if has_logprobs else None,
        prompt_logprobs=has_prompt_logprobs,
        prompt_top_logprobs=draw.choice([None, 1, 20]) if has_prompt_logprobs else None,
        skip_special_tokens=draw.choice([None, False]),
        echo=draw.choice([None, True]),
        continuous_usage=draw.choice([None, True]),
    )
    ids = [draw.randrange(vocab_size) for _ in range(prompt_len)]
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids), sampling=sampling, response=response, truncation=truncation
    )


def draw_truncation(draw: random.Random) -> pb.Truncation:
    return pb.Truncation(
        max_prompt_tokens=draw.randint(1, 60), side=draw.choice(pb.TruncationSide.values())
    )


def num_kept(num_ids: int, truncation: pb.Truncation | None) -> int:
    if truncation is None or not truncation.HasField("max_prompt_tokens"):
        return num_ids  # all that are drawn leave room for one token
    return min(num_ids, truncation.max_prompt_tokens)


@dataclass
class Choice:
    """What came of one."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    tops: list[pb.TopLogprobs] = field(default_factory=list)
    end: pb.Finished | None = None


async def read_whole(
    inference: octavo_pb2_grpc.InferenceStub, request: pb.GenerateRequest, *, pause_s: float = 0
) -> list[Choice]:
    """Reads one stream to its end, waiting once if told to, and checks it."""
    call = inference.Generate(request, timeout=300)
    events = [await call.read()]
    await asyncio.sleep(pause_s)
    events += await rest(call)
    assert [event.seq for event in events] == list(range(len(events)))
    kinds = [event.WhichOneof("event") for event in events]
    num_choices = request.sampling.n or 1
    assert kinds[0] == "accepted"
    assert kinds[-2:] == ["finished", "completed"]
    assert set(kinds[1:-2]) <= {"prompt_delta", "token_delta", "finished"}
    num_prompt_deltas = kinds.count("prompt_delta")
    assert kinds[1 : 1 + num_prompt_deltas] == ["prompt_delta"] * num_prompt_deltas
    check_prompt(events, request)

    choices = [Choice() for _ in range(num_choices)]
    response, usage = request.response, events[-1].completed.usage
    num_tokens = 0
    for event in events[1 + num_prompt_deltas : -1]:
        if event.HasField("finished"):
            choice = choices[event.finished.index]
            assert choice.end is None
            choice.end = event.finished
            continue
        delta = event.token_delta
        choice = choices[delta.index]
        assert choice.end is None, "output after the end"
        choice.token_ids += delta.token_ids
        choice.text += delta.text.decode()  # whole characters only
        choice.logprobs += delta.logprobs
        choice.tops += delta.top_logprobs
        num_tokens += len(delta.token_ids)
        assert delta.HasField("usage") == response.continuous_usage
        if response.continuous_usage:
            so_far = (delta.usage.prompt_tokens, delta.usage.completion_tokens)
            assert so_far == (usage.prompt_tokens, num_tokens)
    assert usage.completion_tokens == num_tokens
    assert usage.cached_tokens < usage.prompt_tokens
    for choice in choices:
        check_choice(choice, request, usage.prompt_tokens)
    return choices


def check_prompt(events: list[pb.GenerateEvent], request: pb.GenerateRequest) -> None:
    """What is said of the prompt is what was asked for."""
    ids, response = list(request.token_ids.ids), request.response
    kept = num_kept(len(ids), request.truncation if request.HasField("truncation") else None)
    accepted, usage = events[0].accepted, events[-1].completed.usage
    assert accepted.prompt_tokens == usage.prompt_tokens == kept
    assert accepted.truncated_tokens == len(ids) - kept
    is_right = request.truncation.side == pb.TRUNCATION_SIDE_RIGHT
    echo = [token_id for event in events for token_id in event.prompt_delta.token_ids]
    assert echo == ((ids[:kept] if is_right else ids[-kept:]) if response.echo else [])
    logprobs = [value for event in events for value in event.prompt_delta.logprobs]
    assert len(logprobs) == (kept - 1) * response.prompt_logprobs
    tops = [top for event in events for top in event.prompt_delta.top_logprobs]
    assert len(tops) == (len(logprobs) if response.prompt_top_logprobs else 0)
    assert {len(top.token_ids) for top in tops} <= {response.prompt_top_logprobs}


def check_choice(choice: Choice, request: pb.GenerateRequest, num_prompt_tokens: int) -> None:
    """It is as long as it says, ended as it may, and holds only what may come."""
    sampling, response, end = request.sampling, request.response, choice.end
    num_tokens = len(choice.token_ids)
    assert len(choice.logprobs) == (num_tokens if response.logprobs else 0)
    assert len(choice.tops) == (num_tokens if response.top_logprobs else 0)
    assert {len(top.token_ids) for top in choice.tops} <= {response.top_logprobs}
    assert not set(sampling.banned_token_ids) & set(choice.token_ids)
    if sampling.HasField("allowed_token_ids"):
        assert set(choice.token_ids) <= set(sampling.allowed_token_ids.ids)
    most = MAX_MODEL_LEN - num_prompt_tokens
    if sampling.HasField("max_tokens"):
        most = sampling.max_tokens
    assert end is not None
    match end.WhichOneof("matched"):
        case "stop_token_id":
            assert end.reason == pb.FINISH_REASON_STOP
            assert choice.token_ids[-1] == end.stop_token_id
        case "stop":
            assert end.reason == pb.FINISH_REASON_STOP
            assert end.stop in sampling.stop
            assert not sampling.include_stop or choice.text.endswith(end.stop)
        case _:
            assert end.reason == pb.FINISH_REASON_LENGTH
            assert num_tokens == most
    if not sampling.min_tokens and not sampling.include_stop:
        assert not any(stop in choice.text for stop in sampling.stop)
    if sampling.guide.regex and end.HasField("stop_token_id"):
        assert re.fullmatch(sampling.guide.regex, choice.text.removesuffix(EOS_TOKEN))


async def settled_load(control: octavo_pb2_grpc.ControlStub) -> pb.GetLoadResponse:
    """The load once no stream is open; the engine frees what a cancelled request held."""
    async with asyncio.timeout(10):
        while True:
            load = await control.GetLoad(pb.GetLoadRequest())
            if not (load.num_streams or load.num_running or load.num_queued):
                return load
            await asyncio.sleep(0.01)


def check_same(choices: list[Choice], alone: list[Choice]) -> None:
    """All of an answer: numbers but for float32 rounding, and near ties may change places."""
    assert len(choices) == len(alone)
    for got, wanted in zip(choices, alone, strict=True):
        assert (got.token_ids, got.text, got.end) == (wanted.token_ids, wanted.text, wanted.end)
        assert got.logprobs == pytest.approx(wanted.logprobs, rel=0, abs=1e-4)
        tops, wanted_tops = (
            [value for top in one.tops for value in top.logprobs] for one in (got, wanted)
        )
        assert tops == pytest.approx(wanted_tops, rel=0, abs=1e-4)


@pytest.mark.parametrize("num_requests", [100, pytest.param(3000, marks=pytest.mark.full)])
def test_requests_of_every_kind(address: str, num_requests: int) -> None:
    async def scenario() -> None:
        draw = random.Random(20)
        async with grpc.aio.insecure_channel(address) as channel:
            inference = octavo_pb2_grpc.InferenceStub(channel)
            control = octavo_pb2_grpc.ControlStub(channel)
            info = await control.GetModelInfo(pb.GetModelInfoRequest())
            assert info.has_guides
            witness = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[5, 6, 7]),
                sampling=pb.Sampling(
                    max_tokens=40,
                    temperature=0.9,
                    seed=11,
                    ignore_eos=True,
                    n=2,
                    frequency_penalty=0.5,
                    stop=["never in a million years"],
                ),
                response=pb.ResponseOptions(logprobs=True, top_logprobs=2, continuous_usage=True),
            )
            alone = await read_whole(inference, witness)
            ends: Counter[str] = Counter()
            gate = asyncio.Semaphore(CONCURRENCY)

            async def run(number: int) -> None:
                request = draw_request(draw, info.vocab_size) if number % 20 else witness
                async with gate:
                    if number % 10 == 7:  # a client that goes away at some point
                        call = inference.Generate(request)
                        await asyncio.sleep(draw.choice([0, 0.001, 0.02, 0.2]))
                        call.cancel()
                    elif number % 10 == 3:  # or that has no time
                        timeout_s = draw.choice([0.001, 0.05, 0.5])
                        await read_until_deadline(inference, request, timeout_s)
                    else:
                        # Some read nothing for a while: then deltas are merged.
                        pause_s = draw.choice([0.0, 0.0, 0.5])
                        choices = await read_whole(inference, request, pause_s=pause_s)
                        if request is witness:
                            check_same(choices, alone)
                        ends.update(
                            str(choice.end.WhichOneof("matched"))
                            for choice in choices
                            if choice.end is not None
                        )

            async with asyncio.TaskGroup() as tasks:
                for number in range(num_requests):
                    tasks.create_task(run(number))

            assert (
                min(ends[kind] for kind in ("stop", "stop_token_id", "None")) > num_requests // 20
            ), ends
            load = await settled_load(control)
            assert load.num_free_pages == load.num_usable_pages > 0
            assert load.compile_events_since_ready == 0
            assert load.preemptions_total > 0

    asyncio.run(scenario())


async def read_until_deadline(
    inference: octavo_pb2_grpc.InferenceStub, request: pb.GenerateRequest, timeout_s: float
) -> None:
    """At most one terminal event, and nothing behind it; none is the transport's own end."""
    kinds: list[str | None] = []
    code = grpc.StatusCode.OK
    try:
        async for event in inference.Generate(request, timeout=timeout_s):
            kinds.append(event.WhichOneof("event"))
    except grpc.aio.AioRpcError as error:
        code = error.code()
    if code is grpc.StatusCode.OK:
        assert kinds.count("completed") == 1
        assert kinds[-1] == "completed"
    else:
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert kinds.count("completed") <= 1
    assert "failed" not in kinds

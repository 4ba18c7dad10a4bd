"""A thousand requests over real gRPC to a real engine with a tiny model, and what must hold after.

Would fail if a stream broke off or lost, repeated or reordered an event, if a page, slot or stream
leaked, if anything compiled after READY, or if a request changed because others ran beside it.
"""

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

from octavo.models.fetch import default_cache_dir
from octavo.server import octavo_pb2 as pb
from octavo.server import octavo_pb2_grpc
from octavo.server.engine_flags import ModelOptions
from octavo.server.local_server import local_server
from octavo.server.model_loading import load_model
from tests.engine.conftest import TINY_ENGINE
from tests.models.tiny_checkpoints import random_tensors, tiny_config, write_huggingface

NUM_REQUESTS = 1000
CONCURRENCY = 48  # some wait for a slot, and pages run out
MAX_MODEL_LEN = 211
assert TINY_ENGINE.max_model_len == MAX_MODEL_LEN


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = tiny_config(max_position=1024)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_huggingface(folder, config, random_tensors(config), dtype=np.float32)
    options = ModelOptions(
        model=str(folder),
        served_name=None,
        engine=TINY_ENGINE,
        cache_dir=Path(),
        compilation_cache_dir=default_cache_dir() / "compiled-by-tests",
    )

    def ignore_progress(stage: str, done: int, total: int) -> None:
        pass

    with local_server(partial(load_model, options), ignore_progress) as at:
        yield at


def draw_request(draw: random.Random, vocab_size: int) -> pb.GenerateRequest:
    """Any legal request; None of a pair of choices leaves the field unset."""
    prompt_len = draw.choice([1, 2, draw.randint(1, 100), MAX_MODEL_LEN - 1])
    room = MAX_MODEL_LEN - prompt_len
    sampling = pb.Sampling(
        max_tokens=draw.choice([None, 1, draw.randint(1, room), room]),
        temperature=draw.choice([None, 0, 1e-6, 0.7, 1.5, 100]),
        top_k=draw.choice([None, -1, 0, 1, 7, vocab_size, 2**31 - 1]),
        top_p=draw.choice([None, 1e-50, 0.3, 0.95, 1]),
        min_p=draw.choice([None, 0, 0.2, 1]),
        seed=draw.choice([None, 0, 2**64 - 1, draw.getrandbits(64)]),
        ignore_eos=draw.choice([None, False, True]),
        stop_token_ids=draw.sample(range(vocab_size), draw.choice([0, 0, 3])),
    )
    response = pb.ResponseOptions(
        logprobs=draw.choice([None, True]),
        prompt_logprobs=draw.choice([None, True]),
        skip_special_tokens=draw.choice([None, False]),
    )
    ids = [draw.randrange(vocab_size) for _ in range(prompt_len)]
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling, response=response)


async def read_whole(
    inference: octavo_pb2_grpc.InferenceStub, request: pb.GenerateRequest
) -> list[int]:
    """Reads one stream to its end and checks it; returns the output ids."""
    events = [event async for event in inference.Generate(request, timeout=300)]
    assert [event.seq for event in events] == list(range(len(events)))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    assert kinds[-2:] == ["finished", "completed"]
    assert set(kinds[1:-2]) <= {"prompt_delta", "token_delta"}

    deltas = [event.token_delta for event in events if event.WhichOneof("event") == "token_delta"]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    for delta in deltas:
        delta.text.decode()  # whole characters only
    num_prompt_tokens = len(request.token_ids.ids)
    usage = events[-1].completed.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt_tokens, len(token_ids))
    logprobs = [value for delta in deltas for value in delta.logprobs]
    assert len(logprobs) == (len(token_ids) if request.response.logprobs else 0)
    prompt_logprobs = [value for event in events for value in event.prompt_delta.logprobs]
    assert len(prompt_logprobs) == (num_prompt_tokens - 1) * request.response.prompt_logprobs

    finished = events[-2].finished
    most = MAX_MODEL_LEN - num_prompt_tokens
    if request.sampling.HasField("max_tokens"):
        most = request.sampling.max_tokens
    if finished.reason == pb.FINISH_REASON_STOP:
        assert token_ids[-1] == finished.stop_token_id
    else:
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert len(token_ids) == most
    return token_ids


async def settled_load(control: octavo_pb2_grpc.ControlStub) -> pb.GetLoadResponse:
    """The load once no stream is open; the engine frees what a cancelled request held."""
    async with asyncio.timeout(10):
        while True:
            load = await control.GetLoad(pb.GetLoadRequest())
            if not (load.num_streams or load.num_running or load.num_queued):
                return load
            await asyncio.sleep(0.01)


def test_a_thousand_requests_of_every_kind(address: str):
    async def scenario() -> None:
        draw = random.Random(20)
        async with grpc.aio.insecure_channel(address) as channel:
            inference = octavo_pb2_grpc.InferenceStub(channel)
            control = octavo_pb2_grpc.ControlStub(channel)
            vocab_size = (await control.GetModelInfo(pb.GetModelInfoRequest())).vocab_size
            witness = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[5, 6, 7]),
                sampling=pb.Sampling(max_tokens=40, temperature=0.9, seed=11, ignore_eos=True),
            )
            alone = await read_whole(inference, witness)
            gate = asyncio.Semaphore(CONCURRENCY)

            async def run(number: int) -> None:
                request = draw_request(draw, vocab_size) if number % 50 else witness
                async with gate:
                    if number % 10 == 7:  # a client that goes away at some point
                        call = inference.Generate(request)
                        await asyncio.sleep(draw.choice([0, 0.001, 0.02, 0.2]))
                        call.cancel()
                        return
                    token_ids = await read_whole(inference, request)
                    assert request is not witness or token_ids == alone

            async with asyncio.TaskGroup() as tasks:
                for number in range(NUM_REQUESTS):
                    tasks.create_task(run(number))

            load = await settled_load(control)
            assert load.num_free_pages == load.num_usable_pages > 0
            assert load.compile_events_since_ready == 0
            assert load.preemptions_total > 0

    asyncio.run(scenario())

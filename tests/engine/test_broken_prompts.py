"""A prompt whose logits mean nothing ends its request before a log-probability of it leaves.

What would break this: a chunk before the last whose log-probabilities are handed out unseen, a
fault that is taken for that of a neighbour in the chunk, or one that is not in the log of the run.
"""

import time
from pathlib import Path

import numpy as np
import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.event_log import EventLog
from octavo.engine.replay import replay
from octavo.engine.request import FinishReason, Request
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from tests.models.tiny_checkpoints import random_tensors, tiny_config, write_huggingface

from .conftest import ignore_progress
from .fakes import Answer, add_request, finish, request

NAN_ID = 200
CHUNK = 16


@pytest.fixture(scope="module")
def broken_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The embedding of one id is NaN: where it was read, logits mean nothing."""
    config = tiny_config(max_position=1024, tie_word_embeddings=False)
    tensors = random_tensors(config)
    tensors["model.embed_tokens.weight"][NAN_ID] = np.nan
    folder = tmp_path_factory.mktemp("broken") / "model"
    write_huggingface(folder, config, tensors, dtype=np.float32)
    return open_checkpoint(folder)


@pytest.mark.usefixtures("compilation_cache")
def test_a_broken_prompt_ends_with_an_error_and_touches_nobody(
    broken_checkpoint: Checkpoint, tmp_path: Path
):
    """Kinds 3.5, 12.1 and 12.2. Its neighbours have the bits that they have without it."""
    path = tmp_path / "log"
    log = EventLog(path, 1 << 30)
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=8,
        prefill_chunk_tokens=CHUNK,
        page_size=4,
        num_pages=200,
        max_model_len=200,
    )
    engine = build_engine(
        broken_checkpoint,
        config,
        eos_token_ids=frozenset(),
        clock=time.monotonic,
        on_progress=ignore_progress,
        recorder=log,
    ).engine

    def asks(name: str, prompt: list[int], *, top: int = 0) -> Request:
        asked = {"prompt_logprobs": True, "logprobs": True, "prompt_top_logprobs": top}
        never = {"banned_token_ids": (NAN_ID,)}
        return request(name, prompt, max_tokens=6, temperature=1.0, seed=3, **asked, **never)

    healthy = [
        asks("long", [*range(3 * CHUNK)], top=3),
        asks("short", [*range(100, 107)]),
        request("plain", [*range(60, 65)], max_tokens=20, banned_token_ids=(NAN_ID,)),
    ]
    # Its place in the prompt, of several chunks: the first, inside a chunk, at the end of one, and
    # the last, which no log-probability is computed from.
    places = {"first": 0, "inside": 20, "at a border": 2 * CHUNK - 1, "last": 4 * CHUNK - 1}
    sick = [
        asks(name, [*range(place), NAN_ID, *range(place, 4 * CHUNK - 1)], top=5)
        for name, place in places.items()
    ]

    def run(requests: list[Request]) -> dict[str, Answer]:
        for one in requests:
            add_request(engine, one)
        return finish(engine)

    alone = run(healthy)
    # In turn, so that they share chunks.
    together = run([sick[0], healthy[0], sick[1], healthy[1], sick[2], healthy[2], sick[3]])
    for one in healthy:
        assert together[one.request_id] == alone[one.request_id]
        assert together[one.request_id].finish_reason is FinishReason.LENGTH
    for name, place in places.items():
        answer = together[name]
        assert answer.finish_reason is FinishReason.ERROR
        assert answer.error is not None
        assert "the model's logits are not finite" in answer.error
        assert not answer.token_ids
        # Whole chunks before the fault were handed out already.
        assert len(answer.prompt_logprobs) <= place
        assert np.isfinite(answer.prompt_logprobs).all()
        assert np.isfinite([logprob for _, logprob in answer.prompt_top]).all()
    assert engine.load().evicted_pages_total["broken"] > 0
    engine.close()
    found = replay(path.read_text().splitlines(keepends=True), request_id="inside")
    assert found.num_steps == engine.load().steps_total
    assert found.story[-1]["reason"] == "error"

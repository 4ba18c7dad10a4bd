"""Kind 2.4: a model's end ids are those of its checkpoint and of its tokenizer together."""

import subprocess
from pathlib import Path

import grpc
import numpy as np
import pytest

from octavo.models.checkpoint import open_checkpoint
from octavo.models.tokenizer import load_tokenizer
from octavo.server import octavo_pb2 as pb
from octavo.server import octavo_pb2_grpc
from tests.models.tiny_checkpoints import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    random_tensors,
    tiny_config,
    write_huggingface,
)

from .processes import OCTAVO, ROOT
from .real_server import COMPILED, serving

OF_THE_CONFIG, OF_GENERATION = 300, 301


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three places name ids; what the tokenizer calls its end of sequence is in neither config."""
    config = tiny_config(max_position=1024)
    return write_huggingface(
        tmp_path / "model",
        config,
        random_tensors(config),
        dtype=np.float32,
        changes={"eos_token_id": OF_THE_CONFIG},
        generation_config={"eos_token_id": [OF_GENERATION, BOS_TOKEN_ID]},
    )


def test_any_of_them_ends_an_output_over_grpc(folder: Path) -> None:
    """Fails if one of the three places is forgotten anywhere between the files and the device."""
    every = {OF_THE_CONFIG, OF_GENERATION, BOS_TOKEN_ID, EOS_TOKEN_ID}
    assert EOS_TOKEN_ID not in open_checkpoint(folder).eos_token_ids
    assert EOS_TOKEN_ID in load_tokenizer(folder).eos_token_ids
    with serving(folder) as address, grpc.insecure_channel(address) as channel:
        info = octavo_pb2_grpc.ControlStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert set(info.eos_token_ids) == every
        for end_id in every:
            asked = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[5, 6, 7]),
                sampling=pb.Sampling(
                    max_tokens=5, temperature=0, min_tokens=2, logit_bias={end_id: 100.0}
                ),
            )
            events = [*octavo_pb2_grpc.InferenceStub(channel).Generate(asked)]
            (end,) = [event.finished for event in events if event.HasField("finished")]
            assert end == pb.Finished(reason=pb.FINISH_REASON_STOP, stop_token_id=end_id)
            assert events[-1].completed.usage.completion_tokens == 3


def test_a_model_with_many_of_them_generates_with_the_flag_that_makes_room(folder: Path) -> None:
    """Fails if `generate` lacks --max_stop_ids, without which such a model could not be tried."""

    command = [*OCTAVO, "generate", f"--model={folder}", "--prompt_ids=5,6", "--max_tokens=1"]
    command += ["--num_pages=9", "--prefill_chunk_tokens=16", f"--compilation_cache_dir={COMPILED}"]

    def generate(max_stop_ids: int) -> subprocess.CompletedProcess[str]:
        line = [*command, f"--max_stop_ids={max_stop_ids}"]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)

    refused = generate(3)
    assert "max_stop_ids is 3; it must be at least 4" in refused.stderr
    assert refused.returncode != 0
    assert generate(4).returncode == 0

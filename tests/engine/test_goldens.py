"""The default model against Hugging Face transformers' outputs from the same file.

The one test that knows what the numbers should be, and not only that they agree with each other:
it would break with a wrong RoPE, norm, mask, head order, dequantisation or sampling position.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.engine.engine import Engine

from .fakes import Answer, add_request, finish, request

CLEAR_GAP = 0.01  # where the two best logits are closer, two correct programs may differ
LOGPROB_ERROR = 1e-3


@pytest.fixture(scope="module")
def goldens() -> list[dict[str, Any]]:
    path = Path(__file__).parents[1] / "goldens" / "smollm2-135m-instruct.json"
    return json.loads(path.read_text())["items"]


def run(engine: Engine, goldens: list[dict[str, Any]], **sampling: Any) -> list[Answer]:
    """Greedy answers to all prompts, sent at once."""
    for number, golden in enumerate(goldens):
        add_request(engine, request(str(number), golden["prompt_ids"], **sampling))
    answers = finish(engine)
    return [answers[str(number)] for number in range(len(goldens))]


def test_float32_gives_the_reference_ids_and_log_probabilities(
    default_engine_float32: Engine, goldens: list[dict[str, Any]]
):
    answers = run(
        default_engine_float32, goldens, max_tokens=48, logprobs=True, prompt_logprobs=True
    )
    num_compared = 0
    for golden, answer in zip(goldens, answers, strict=True):
        np.testing.assert_allclose(
            answer.prompt_logprobs, golden["prompt_logprobs"][1:], rtol=0, atol=LOGPROB_ERROR
        )
        pairs = zip(answer.token_ids, golden["greedy_ids"], strict=True)
        same = next((i for i, (found, wanted) in enumerate(pairs) if found != wanted), 48)
        assert same == 48 or golden["top1_top2_gap"][same] <= CLEAR_GAP, golden["prompt"]
        np.testing.assert_allclose(
            answer.logprobs[:same], golden["logprobs"][:same], rtol=0, atol=LOGPROB_ERROR
        )
        num_compared += same
    assert num_compared > 0.9 * 48 * len(goldens), "close calls ended most comparisons"


def test_bfloat16_gives_nine_of_ten_first_tokens(
    default_engine_bfloat16: Engine, goldens: list[dict[str, Any]]
):
    answers = run(default_engine_bfloat16, goldens, max_tokens=1)
    same = [
        answer.token_ids[0] == golden["greedy_ids"][0]
        for golden, answer in zip(goldens, answers, strict=True)
    ]
    assert sum(same) >= 0.9 * len(goldens)

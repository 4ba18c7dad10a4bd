"""Kind 3.5: log-probabilities are the model's own and finite, whatever else is asked for.

An output that was told under some rules is sent back as a prompt without any: what was said of its
tokens then must be what is said of them now.
"""

import math
from typing import Any

import numpy as np
import pytest

from octavo.engine.engine import Engine
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.engine.token_masks import Mask, num_words, with_ids

from .conftest import TINY_ENGINE, Model
from .fakes import add_request, finish, request

PROMPT = tuple((3 + at * at * 7) % 300 for at in range(20))
VOCAB_SIZE = 320
NUM_TOKENS = 10
NUM_TOP = 5
ROUNDING = 1e-4  # of float32, between a decode row and a chunk


class OneOfTwo:
    """A guide that lets two ids come, for ever."""

    def start(self, guide: Guide) -> "OneOfTwo":
        return self

    def mask(self) -> Mask:
        return with_ids(np.zeros(num_words(VOCAB_SIZE), np.int32), (5, 9))

    def take(self, token_id: int) -> None:
        pass


@pytest.fixture(scope="module")
def engine(tiny_model: Model) -> Engine:
    return tiny_model.build(TINY_ENGINE, OneOfTwo())


DRAWN = {"temperature": 1.0, "seed": 5}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**DRAWN, "temperature": 0.2},
        {**DRAWN, "temperature": 50.0},
        {**DRAWN, "top_k": 1},
        {**DRAWN, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
        {"repetition_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logit_bias": tuple((token_id, -100.0) for token_id in range(200))},
        {**DRAWN, "logit_bias": ((7, 100.0),)},
        {**DRAWN, "allowed_token_ids": (5, 9)},
        {"banned_token_ids": tuple(range(1, 320))},
        {"min_tokens": NUM_TOKENS, "stop_token_ids": (1, 2, 3)},
        {**DRAWN, "guide": Guide(kind=GuideKind.REGEX), "ignore_eos": False},
    ],
    ids=str,
)
def test_outputs_under_any_rule_are_scored_as_prompts_are(engine: Engine, options: dict[str, Any]):
    """Fails if a mask, a penalty, a bias or a temperature shows in what is reported."""
    told = request(
        "told", PROMPT, max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=NUM_TOP, **options
    )
    add_request(engine, told)
    output = finish(engine)["told"]
    assert len(output.token_ids) == NUM_TOKENS
    again = request(
        "again",
        (*PROMPT, *output.token_ids),
        max_tokens=1,
        prompt_logprobs=True,
        prompt_top_logprobs=NUM_TOP,
    )
    add_request(engine, again)
    prompt = finish(engine)["again"]
    expected = prompt.prompt_logprobs[-NUM_TOKENS:]
    np.testing.assert_allclose(output.logprobs, expected, rtol=0, atol=ROUNDING)
    expected_top = prompt.prompt_top[-NUM_TOKENS * NUM_TOP :]
    np.testing.assert_allclose(
        [logprob for _, logprob in output.top],
        [logprob for _, logprob in expected_top],
        rtol=0,
        atol=ROUNDING,
    )
    numbers = [*output.logprobs, *prompt.prompt_logprobs]
    numbers += [logprob for _, logprob in output.top + prompt.prompt_top]
    assert all(math.isfinite(number) and number <= 0 for number in numbers)
    # Five most likely ids are there though two may come, and they are the model's.
    ids = [token_id for token_id, _ in output.top[:NUM_TOP]]
    assert len(set(ids)) == NUM_TOP
    assert ids == [token_id for token_id, _ in expected_top[:NUM_TOP]]

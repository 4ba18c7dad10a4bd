"""What a request should get: one token after the other, alone, over the whole context, in NumPy.

No pages, no chunks, no batch, none of the engine's code. Beside each token stands how close the
call was, since two correct programs may round a close one differently.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from octavo.engine.request import FinishReason
from octavo.engine.sampling_params import SamplingParams
from tests.models.numpy_decoder import NumpyDecoder

from . import sampling_oracle
from .fakes import Answer
from .sampling_oracle import Draw

# Two correct float32 programs may differ where the two best logits are closer than CLOSE_GAP; where
# the random number lies within CLOSE_MASS of a border (1e-7 was seen with 49,152 tokens); and where
# a rule parts two tokens whose scaled logits are closer than CLOSE_BORDER (2e-6 was seen).
CLOSE_GAP = 1e-3
CLOSE_MASS = 1e-5
CLOSE_BORDER = 1e-4
LOGPROB_ERROR = 1e-3


@dataclass
class NaiveRun:
    """What a request gets.

    Attributes:
      token_ids: Output ids.
      draws: Of each output id: how close the call was.
      logprobs: Of each output id under the raw distribution.
      prompt_logprobs: Of every prompt token but the first.
      finish_reason: STOP or LENGTH; ERROR where no id is left that may come.
    """

    token_ids: list[int] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def generate(
    decoder: NumpyDecoder,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    *,
    eos_token_ids: Collection[int],
    choice: int = 0,
) -> NaiveRun:
    """Runs one choice of a request that brings max_tokens and, unless it is greedy, a seed."""
    assert sampling.max_tokens is not None
    assert sampling.guide is None, "there is no naive run of a guide"
    run, cache = NaiveRun(), decoder.empty_cache()
    stop_ids = sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)})
    hidden = decoder.hidden(prompt, cache)
    if sampling.prompt_logprobs and choice == 0:  # it is reported once
        for first in range(0, len(prompt) - 1, 64):
            targets = prompt[first + 1 : first + 65]
            scores = decoder.logits(hidden[first : first + len(targets)])
            run.prompt_logprobs += map(_logprob, scores, targets)
    while run.finish_reason is None:
        scores = decoder.logits(hidden[-1])
        ruled = sampling_oracle.apply_rules(
            scores, sampling, prompt=prompt, output=run.token_ids, stop_ids=stop_ids
        )
        if not np.isfinite(ruled.max()):
            run.finish_reason = FinishReason.ERROR
            break
        drawn = sampling_oracle.draw(ruled, sampling, position=len(run.token_ids), choice=choice)
        run.token_ids.append(drawn.token)
        run.draws.append(drawn)
        run.logprobs.append(_logprob(scores, drawn.token))
        if drawn.token in stop_ids:
            run.finish_reason = FinishReason.STOP
        elif len(run.token_ids) == sampling.max_tokens:
            run.finish_reason = FinishReason.LENGTH
        else:
            hidden = decoder.hidden([drawn.token], cache)
    return run


def _logprob(scores: np.ndarray, token: int) -> float:
    wide = scores.astype(np.float64)
    return float(wide[token] - wide.max() - np.log(np.exp(wide - wide.max()).sum()))


def assert_agrees(answer: Answer, run: NaiveRun, sampling: SamplingParams) -> bool:
    """Holds an engine's answer to the naive run; returns whether a close call ended it early.

    At a close call the tokens may differ, and nothing after counts.
    """
    same = 0
    for found, expected in zip(answer.token_ids, run.token_ids, strict=False):
        if found != expected:
            break
        same += 1
    if answer.prompt_logprobs:
        np.testing.assert_allclose(
            answer.prompt_logprobs, run.prompt_logprobs, rtol=0, atol=LOGPROB_ERROR
        )
    if answer.logprobs:
        np.testing.assert_allclose(
            answer.logprobs[:same], run.logprobs[:same], rtol=0, atol=LOGPROB_ERROR
        )
    if (answer.token_ids, answer.finish_reason) == (run.token_ids, run.finish_reason):
        return False
    assert same < len(run.token_ids), "the right tokens, but another end"
    draw = run.draws[same]
    close_margin = CLOSE_GAP if sampling.temperature == 0 else CLOSE_MASS
    is_close = draw.margin < close_margin or draw.border_gap < CLOSE_BORDER
    assert is_close, f"token {same} is wrong: {answer} instead of {run}"
    return True

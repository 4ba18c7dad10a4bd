"""What engine.sampling_params promises, in NumPy: sorted and summed in float64, one row at a time.

Nothing here looks at the sampler's code. Beside the token it says how close the call was: by how
much the uniform number and every border of a rule missed another outcome.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.engine.sampling_params import SamplingParams

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Draw:
    """A token and how sure it is.

    Attributes:
      token: The id.
      margin: Greedy: what the highest logit is above the second. Drawn: the least probability mass
        (before truncation and after it alike) by which some decision could have gone the other way.
      border_gap: The least difference, of logits over temperature, between the last token that a
        rule kept and the first it did not. Whoever computes the logits anew may find these two in
        the other order, and then everything after a border shifts. inf: nothing was cut off.
    """

    token: int
    margin: float
    border_gap: float = np.inf


def threefry_2x32(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """20 rounds of Threefry-2x32. Source: https://doi.org/10.1145/2063384.2063405, section 3.3."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    x, y = ((word + k) & _WORD for word, k in zip(counter, keys[:2], strict=True))
    for block in range(5):
        for rotation in rotations[block % 2]:
            x = (x + y) & _WORD
            y = ((y << rotation | y >> (32 - rotation)) & _WORD) ^ x
        x = (x + keys[(block + 1) % 3]) & _WORD
        y = (y + keys[(block + 2) % 3] + block + 1) & _WORD
    return x, y


def uniform(seed: int, position: int, choice: int = 0) -> float:
    """The number in [0, 1) of a choice's output position: 24 bits."""
    words = threefry_2x32((seed & _WORD, seed >> 32), (position, choice))
    return (words[0] >> 8) / 2**24


def apply_rules(
    logits: np.ndarray,
    sampling: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    position: int | None = None,
) -> np.ndarray:
    """Steps 1 to 4 of SamplingParams, in float64; -inf where an id must not come.

    Args:
      logits: The model's.
      sampling: The request's.
      prompt: Its prompt.
      output: What it has said.
      stop_ids: Those that end it, the model's own included.
      position: Output position, if it is not the length of `output`.
    """
    position = len(output) if position is None else position
    changed = logits.astype(np.float64)
    times = np.bincount(np.asarray(output, np.int64), minlength=len(logits))
    seen = [*{*prompt, *output}]
    repetition = _float32(sampling.repetition_penalty)
    was = changed[seen]
    changed[seen] = np.where(was > 0, was / repetition, was * repetition)
    changed -= _float32(sampling.frequency_penalty) * times
    changed -= _float32(sampling.presence_penalty) * (times > 0)
    for token_id, bias in sampling.logit_bias:
        changed[token_id] += _float32(bias)
    if sampling.allowed_token_ids is not None:
        is_allowed = np.zeros(len(logits), bool)
        is_allowed[list(sampling.allowed_token_ids)] = True
        changed[~is_allowed] = -np.inf
    changed[list(sampling.banned_token_ids)] = -np.inf
    if position < sampling.min_tokens:
        changed[list(stop_ids)] = -np.inf
    return changed


def _float32(value: float) -> float:
    """A parameter as the device has it."""
    return float(np.float32(value))


def survivors(
    logits: np.ndarray, sampling: SamplingParams
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """The tokens that step 6 leaves, most likely first, their likelihoods, margin, border gap.

    Logits are rounded to float32, and likelihoods, relative to the most likely token, computed in
    float32, as the device has them: which tokens tie is decided by that. All sums are float64.

    Args:
      logits: After all rules.
      sampling: With a temperature above 0.
    """
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    logits = logits.astype(np.float32)
    scaled = (logits - logits.max()) / np.float32(sampling.temperature)
    likelihood = np.exp(scaled).astype(np.float64)
    order = np.lexsort((np.arange(len(logits)), -logits))
    total = likelihood.sum()
    margins, gaps = [np.inf], [np.inf]

    def cut(count: int) -> None:
        nonlocal order
        if count < len(order):
            if likelihood[order[count]] > 0:  # where nothing is likely, nothing matters
                gaps.append(np.abs(scaled[order[count - 1]] - scaled[order[count]]))
            order = order[:count]

    if top_k > 0:
        cut(top_k)
    order = order[np.lexsort((order, -likelihood[order]))]
    value = likelihood[order]

    def keep(count: int) -> None:
        nonlocal value
        if count < len(value):
            # Equal logits tie everywhere, and the lower id is kept. Different ones that round to
            # nearly the same likelihood could change places.
            is_tie = scaled[order[count - 1]] == scaled[order[count]]
            if not is_tie and value[count] > value[count - 1] * (1 - 1e-6):
                margins.append(0.0)
            cut(count)
            value = likelihood[order]

    if top_p < 1:
        target = np.float64(np.float32(top_p)) * value.sum()
        sums = np.cumsum(value)
        margins.append(np.abs(sums[:-1] - target).min(initial=np.inf) / total)
        keep(int(np.searchsorted(sums, target)) + 1)
    if min_p > 0:
        bound = np.float64(np.float32(min_p))
        # A token that is not exactly at the bound may be put there by rounding.
        off = np.abs(value[1:] - bound)
        margins.append(off[off > 0].min(initial=np.inf) / total)
        keep(max(1, int((value >= bound).sum())))
    keep(max(1, int((value > 0).sum())))
    return order, value, float(min(margins)), float(min(gaps))


def distribution(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """The probability of every id, from logits after all rules."""
    tokens, value, *_ = survivors(logits, sampling)
    probability = np.zeros(len(logits))
    probability[tokens] = value / value.sum()
    return probability


def draw(
    logits: np.ndarray, sampling: SamplingParams, *, position: int = 0, choice: int = 0
) -> Draw:
    """The token of one row, from logits after all rules. Without a seed it is drawn with 0."""
    if sampling.temperature == 0:
        best = int(np.argmax(logits))
        return Draw(best, float(logits[best] - np.delete(logits, best).max()))
    tokens, value, margin, border_gap = survivors(logits, sampling)
    by_id = np.argsort(tokens)
    ends = np.cumsum(value[by_id]) / value.sum()
    chance = uniform(sampling.seed or 0, position, choice)
    place = min(int(np.searchsorted(ends, chance, side="right")), len(ends) - 1)
    # The distance to the nearest border between two survivors; 0 and 1 are no such borders.
    margin = min(margin, np.abs(ends[:-1] - chance).min(initial=np.inf))
    return Draw(int(tokens[by_id][place]), float(margin), border_gap)

"""What engine.sampler promises, in NumPy: sorted and summed in float64, one row at a time.

Nothing here looks at the sampler's code. Beside the token it says how close the call was: by how
much the uniform number and every border of a rule missed another outcome.
"""

from dataclasses import dataclass

import numpy as np

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


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) of a request's output position: 24 bits."""
    words = threefry_2x32((seed & _WORD, seed >> 32), (position, 0))
    return (words[0] >> 8) / 2**24


def survivors(
    logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """The tokens that the rules leave, most likely first, their likelihoods, margin, border gap.

    Likelihoods are relative to the most likely token, computed in float32 as the device has them:
    which tokens tie is decided by that. All sums are float64.
    """
    scaled = (logits.astype(np.float32) - np.float32(logits.max())) / np.float32(temperature)
    likelihood = np.exp(scaled).astype(np.float64)
    order = np.lexsort((np.arange(len(logits)), -likelihood))
    value, total = likelihood[order], likelihood.sum()
    margins, gaps = [np.inf], [np.inf]

    def keep(count: int) -> None:
        nonlocal value
        if count < len(value):
            # Equal logits tie everywhere, and the lower id is kept. Different ones that round to
            # nearly the same likelihood could change places.
            kept, dropped = scaled[order[count - 1]], scaled[order[count]]
            if kept != dropped and value[count] > value[count - 1] * (1 - 1e-6):
                margins.append(0.0)
            if value[count] > 0:  # where nothing is likely, nothing matters
                gaps.append(kept - dropped)
            value = value[:count]

    if top_k > 0:
        keep(top_k)
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
    return order[: len(value)], value, float(min(margins)), float(min(gaps))


def draw(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> Draw:
    """The token of one row."""
    if temperature == 0:
        best = int(np.argmax(logits))
        return Draw(best, float(logits[best] - np.delete(logits, best).max()))
    tokens, value, margin, border_gap = survivors(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    by_id = np.argsort(tokens)
    ends = np.cumsum(value[by_id]) / value.sum()
    chance = uniform(seed, position)
    place = min(int(np.searchsorted(ends, chance, side="right")), len(ends) - 1)
    # The distance to the nearest border between two survivors; 0 and 1 are no such borders.
    margin = min(margin, np.abs(ends[:-1] - chance).min(initial=np.inf))
    return Draw(int(tokens[by_id][place]), float(margin), border_gap)

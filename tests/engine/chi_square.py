"""Whether counts of draws could have come from a distribution: Pearson's chi-square.

SciPy is there because JAX needs it.
"""

import numpy as np
from scipy.special import gammaincc  # pyrefly: ignore[untyped-import]

LEAST_EXPECTED = 5  # draws per bin, below which the statistic follows chi-square badly


def p_value(counts: np.ndarray, probability: np.ndarray) -> float:
    """How likely a statistic as high as that of these counts is; 0 if one was impossible.

    Rare ids are put together with those after them until a bin expects enough draws: so a flat
    distribution over many ids still has as many bins as the draws are good for.
    """
    if counts[probability == 0].any():
        return 0.0
    expected = probability * counts.sum()
    is_common = expected >= LEAST_EXPECTED
    rare_bin = (np.cumsum(expected[~is_common]) // LEAST_EXPECTED).astype(int)
    rare_expected = np.bincount(rare_bin, expected[~is_common])
    rare_counts = np.bincount(rare_bin, counts[~is_common])
    # Bins begin where a sum passes a border, so some hold less: they go to a neighbour's.
    is_enough = rare_expected >= LEAST_EXPECTED
    wanted = [*expected[is_common], *rare_expected[is_enough], rare_expected[~is_enough].sum()]
    found = [*counts[is_common], *rare_counts[is_enough], rare_counts[~is_enough].sum()]
    if wanted[-1] < LEAST_EXPECTED and len(wanted) > 1:
        smallest = int(np.argmin(wanted[:-1]))
        wanted[smallest] += wanted.pop()
        found[smallest] += found.pop()
    if len(wanted) == 1:
        return 1.0
    statistic = sum((f - w) ** 2 / w for f, w in zip(found, wanted, strict=True))
    return float(gammaincc((len(wanted) - 1) / 2, statistic / 2))

"""Whether paired differences lean to one side: a permutation test, exact, without distributions."""

import itertools
from collections.abc import Sequence


def p_value(differences: Sequence[float]) -> float:
    """How likely a sum this far from 0 is if each difference is as likely to have either sign.

    Two-sided; never below 2 to the power of 1 - n.
    """
    seen = abs(sum(differences)) * (1 - 1e-12)  # a sum in another order is the same sum
    signs = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(one, differences, strict=True))) for one in signs]
    return sum(one >= seen for one in sums) / len(sums)

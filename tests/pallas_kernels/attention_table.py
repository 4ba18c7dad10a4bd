"""The table of shapes that every backend is held to: every pair of values of every two parameters.

Pairwise, because a fault in a kernel is mostly one of two things meeting (a page size and a head
width, a window and a group), and the full product would be thousands of compilations.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .attention_cases import EVERYTHING, PLAIN, Options, Shape

PARAMETERS: Mapping[str, Sequence[Any]] = {
    "rows": (1, 2, 8, 33, 64, 256),
    "group": (1, 2, 3, 4, 7, 8, 16),
    "kv_heads": (1, 2, 3, 4, 8),
    "head_dim": (64, 80, 96, 128, 256),
    "page_size": (16, 32, 64, 128, 256),
    "chunk": (0, 16, 48, 128),
    "options": (
        PLAIN,
        Options(window=45),
        Options(window=160),
        Options(softcap=2.0),
        Options(sinks=True),
        Options(k_scale=0.25, v_scale=2.0),
        EVERYTHING,
    ),
}

_CANDIDATES = 60  # combinations that are looked at for each one taken
_MOST_ELEMENTS = 2**23  # of keys, so that a test takes seconds; each pair still has a combination


def _is_small(values: Mapping[str, Any]) -> bool:
    tokens = values["rows"] * values["page_size"]
    return tokens * values["kv_heads"] * values["head_dim"] <= _MOST_ELEMENTS


def pairwise(
    parameters: Mapping[str, Sequence[Any]],
    is_wanted: Callable[[Mapping[str, Any]], bool] = lambda values: True,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Combinations that hold every pair of values of every two parameters; greedy, not minimal.

    Args:
      parameters: Values of each.
      is_wanted: Whether to have a combination; every pair must be in one that is wanted.
      seed: Of the choice among equally good ones.
    """
    names = list(parameters)
    missing = {
        (one, i, other, j)
        for one, other in itertools.combinations(range(len(names)), 2)
        for i in range(len(parameters[names[one]]))
        for j in range(len(parameters[names[other]]))
    }
    rng = np.random.default_rng(seed)
    taken: list[dict[str, Any]] = []
    while missing:
        one, i, other, j = min(missing)
        best: dict[str, Any] = {}
        best_new: set[tuple[int, int, int, int]] = set()
        for _ in range(_CANDIDATES):
            choice = [int(rng.integers(len(parameters[name]))) for name in names]
            choice[one], choice[other] = i, j
            values = {name: parameters[name][at] for name, at in zip(names, choice, strict=True)}
            new = pairs(choice) & missing
            if len(new) > len(best_new) and is_wanted(values):
                best, best_new = values, new
        if best:
            missing -= best_new
            taken.append(best)
    return taken


def pairs(choice: Sequence[int]) -> set[tuple[int, int, int, int]]:
    """All pairs of a combination: (parameter, value, other parameter, value)."""
    return {
        (one, choice[one], other, choice[other])
        for one, other in itertools.combinations(range(len(choice)), 2)
    }


def table(dtype: str) -> list[Shape]:
    """The whole table. Contexts are short where rows are many: interpreters are slow."""
    return [
        Shape(**values, dtype=dtype, max_len=140 if values["rows"] > 8 else 520)
        for values in combinations()
    ]


def combinations() -> list[dict[str, Any]]:
    """The table as values of its parameters."""
    return pairwise(PARAMETERS, _is_small)

"""A model that is a hash: what comes next depends on the whole history and on every rule."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.engine import packing

VOCAB_SIZE = 40
EOS = 7


def hash_of(*numbers: int) -> int:
    digest = hashlib.blake2b(np.array(numbers, np.uint64).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@dataclass
class Rules:
    """What changes the fake model's mind, as engine.logit_rules knows it.

    Attributes:
      counts: Of a request with penalties: by id, 1 if it is in the prompt, and 2 for each time that
        it is in the output.
      biases: (id, bias) in order.
      may_come: Ids that may come.
    """

    counts: dict[int, int] = field(default_factory=dict)
    biases: tuple[tuple[int, float], ...] = ()
    may_come: tuple[int, ...] = tuple(range(VOCAB_SIZE))


NO_RULES = Rules()


def next_token(
    history: Sequence[int], seed: int | None, choice: int = 0, rules: Rules = NO_RULES
) -> int:
    """What the fake model says after `history`; `seed` counts unless it is None (greedy)."""
    numbers = [*history, 0 if seed is None else seed % 2**63 + 1 + choice]
    for token_id, count in sorted(rules.counts.items()):
        numbers += [token_id, count]
    for token_id, bias in rules.biases:
        numbers += [token_id, packing.float_bits(bias) % 2**32]
    return rules.may_come[hash_of(*numbers) % len(rules.may_come)]


def top_of(history: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Some ids and their log-probabilities, which depend on the history."""
    ids = [(history[-1] + 7 * place) % VOCAB_SIZE for place in range(count)]
    return ids, [logprob_of(history, token_id) for token_id in ids]


def logprob_of(history: Sequence[int], token: int) -> float:
    """Exact in float32, and different for every history."""
    return -float(hash_of(*history, token) % 4096) / 64

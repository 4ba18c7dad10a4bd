"""Random rows for the sampler, and random logits: extremes as often as ordinary values."""

from typing import Any

import numpy as np

from octavo.engine.sampling_params import SamplingParams

from .sampler_rows import MAX_BIASES, MAX_STOP_IDS, Row


def random_truncation(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    """Any combination; extremes as often as ordinary values."""
    everything = [-1, vocab - 1, vocab, vocab + 1, 2**31 - 1]
    return {
        "temperature": float(rng.choice([0.0, 1e-6, 0.1, 0.7, 1.0, 1.5, 100.0])),
        "top_k": int(rng.choice([0, 0, 1, 2, 5, 40, 63, 64, 65, 100, *everything])),
        "top_p": float(rng.choice([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999999])),
        "min_p": float(rng.choice([0.0, 0.0, 1e-6, 0.01, 0.1, 0.5, 1.0])),
    }


def random_rules(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    """Each rule in two rows of five; some id is always left."""

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.permutation(vocab)[: rng.integers(least, most + 1)].tolist())

    rules: dict[str, Any] = {
        "repetition_penalty": float(rng.choice([0.5, 1.3, 2.0, 100.0])),
        "frequency_penalty": float(rng.choice([-2.0, 0.3, 2.0])),
        "presence_penalty": float(rng.choice([-1.5, 0.1, 2.0])),
        "logit_bias": tuple(
            (token_id, float(rng.choice([-100.0, -1.5, 0.7, 5.0, 100.0])))
            for token_id in some(1, MAX_BIASES)
        ),
        "allowed_token_ids": some(vocab // 2, vocab),
        "banned_token_ids": some(1, vocab // 4),
        "min_tokens": 2,
    }
    return {name: value for name, value in rules.items() if rng.random() < 0.4} | {
        "stop_token_ids": some(1, min(MAX_STOP_IDS, vocab // 5))
    }


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    """Without rules as often as with them: rows without take other ways."""
    rules = random_rules(rng, vocab) if rng.random() < 0.5 else {}
    return Row(
        sampling=SamplingParams(
            **random_truncation(rng, vocab),
            **rules,
            seed=int(rng.integers(2**64, dtype=np.uint64)),
        ),
        prompt=tuple(rng.integers(0, vocab, rng.integers(1, 12)).tolist()),
        output=tuple(rng.integers(0, vocab, rng.integers(0, 12)).tolist()),
        position=int(rng.choice([0, 1, 2, 4095])),
        choice=int(rng.choice([0, 0, 1, 127])),
    )


def random_logits(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Of one row: flat, peaked, tied in various ways, partly or nearly all impossible."""
    kind = rng.integers(8)
    logits = rng.normal(0, rng.choice([0.01, 1.0, 5.0, 30.0]), vocab)
    if kind == 0:
        logits[:] = rng.normal()
    elif kind == 1:  # a few values only: ties everywhere
        logits = np.round(logits * rng.choice([0.3, 1.0]))
    elif kind == 2:  # one high, all others tied
        logits[:] = -1.0
        logits[rng.integers(vocab)] = 3.0
    elif kind == 3:  # many tied at the top, scattered over the blocks
        logits[rng.permutation(vocab)[: vocab // 2]] = logits.max()
    elif kind == 4:
        logits[rng.permutation(vocab)[: vocab // 2]] = -np.inf
    elif kind == 5:
        only = rng.integers(vocab)
        logits[np.arange(vocab) != only] = -np.inf
    elif kind == 6:
        logits[rng.integers(vocab)] += 1e4
    return logits.astype(np.float32)

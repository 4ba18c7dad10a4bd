"""Rows of the sampler's batch, made from what requests want; and the sampler run on them.

Whatever a row has no use for is filled with what would do harm: the counts, biases and masks of
slots are stale in production too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from octavo.engine import sampler
from octavo.engine.logit_rules import LogitRules, RuleTables
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.sampling_rows import SamplingRows
from octavo.engine.token_masks import num_words

from . import sampling_oracle

# Every rule that a row may have, by the name of its parameter.
RULES = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "allowed_token_ids",
    "banned_token_ids",
    "min_tokens",
]

# One width and one number of rows for all, so that few shapes are compiled.
NUM_ROWS = 64
MAX_BIASES = 8
MAX_STOP_IDS = 4
NO_ID = -1
MOST_TIMES = 2**14 - 1  # what 15 bits count to

GREEDY = SamplingParams(temperature=0.0)

_sample = jax.jit(sampler.sample)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: a request and where it stands.

    Attributes:
      sampling: What it wants. Its stop_token_ids are all that it stops at.
      prompt: Its prompt.
      output: What it has said, as the penalties see it.
      position: Output position. What has been said need not be as long: more positions with one
        history are more draws from one distribution.
      choice: Which of the request's choices it is.
    """

    sampling: SamplingParams = GREEDY
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    position: int = 0
    choice: int = 0

    def ruled(self, logits: np.ndarray) -> np.ndarray:
        """What the oracle says that its rules make of the model's logits."""
        return sampling_oracle.apply_rules(
            logits,
            self.sampling,
            prompt=self.prompt,
            output=self.output,
            stop_ids=self.sampling.stop_token_ids,
            position=self.position,
        )


PADDING = Row()


def arrays(rows: Sequence[Row], vocab: int) -> tuple[SamplingRows, LogitRules, RuleTables]:
    """What the device has of these rows, slots in any order."""
    rng = np.random.default_rng(0)
    wanted = [row.sampling for row in rows]
    seeds = [sampling.seed or 0 for sampling in wanted]
    words = [[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds]
    sampling_rows = SamplingRows(
        temperature=_floats([sampling.temperature for sampling in wanted]),
        top_k=_ints([sampling.top_k for sampling in wanted]),
        top_p=_floats([sampling.top_p for sampling in wanted]),
        min_p=_floats([sampling.min_p for sampling in wanted]),
        seed=jnp.asarray(np.array(words, np.uint32)),
        position=_ints([row.position for row in rows]),
        choice=_ints([row.choice for row in rows]),
    )
    num_slots = len(rows) + 3
    slots = rng.permutation(num_slots)[: len(rows)]
    counts = rng.integers(0, 2**15, (num_slots, vocab), np.int16)
    bias_ids = rng.integers(0, vocab, (num_slots, MAX_BIASES), np.int32)
    bias = np.full((num_slots, MAX_BIASES), np.nan, np.float32)
    masks = rng.integers(-(2**31), 2**31, (num_slots, num_words(vocab)), np.int32)
    not_yet = np.full((len(rows), MAX_STOP_IDS), NO_ID, np.int32)
    for slot, row, ruled_out in zip(slots, rows, not_yet, strict=True):
        sampling = row.sampling
        if sampling.has_penalties:
            counts[slot] = _history(row, vocab)
        for column, entry in enumerate(sampling.logit_bias):
            bias_ids[slot, column], bias[slot, column] = entry
        if _is_masked(sampling):
            _write_mask(masks[slot], sampling, vocab)
        if row.position < sampling.min_tokens:
            ruled_out[: len(sampling.stop_token_ids)] = sampling.stop_token_ids
    rules = LogitRules(
        slot=_ints(slots),
        repetition_penalty=_floats([sampling.repetition_penalty for sampling in wanted]),
        frequency_penalty=_floats([sampling.frequency_penalty for sampling in wanted]),
        presence_penalty=_floats([sampling.presence_penalty for sampling in wanted]),
        num_biased=_ints([len(sampling.logit_bias) for sampling in wanted]),
        is_masked=jnp.asarray(np.array([_is_masked(sampling) for sampling in wanted])),
        not_yet=jnp.asarray(not_yet),
    )
    tables = RuleTables(*(jnp.asarray(table) for table in (counts, bias_ids, bias, masks)))
    return sampling_rows, rules, tables


def sample(logits: np.ndarray, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Token of each row, of at most NUM_ROWS, and whether it means nothing."""
    num_rows, vocab = logits.shape
    padding = NUM_ROWS - num_rows
    padded = np.pad(logits, ((0, padding), (0, 0)))
    token, is_broken = _sample(jnp.asarray(padded), *arrays([*rows, *[PADDING] * padding], vocab))
    return np.asarray(token)[:num_rows], np.asarray(is_broken)[:num_rows]


def _ints(values: Sequence[int] | np.ndarray) -> jax.Array:
    return jnp.asarray(np.array(values, np.int32))


def _floats(values: Sequence[float]) -> jax.Array:
    return jnp.asarray(np.array(values, np.float32))


def _history(row: Row, vocab: int) -> np.ndarray:
    """Bit 0: in the prompt; the others: how often in the output."""
    times = np.bincount(np.array(row.output, np.int64), minlength=vocab)
    counts = np.minimum(times, MOST_TIMES) << 1
    counts[list(row.prompt)] |= 1
    return counts.astype(np.int16)


def _is_masked(sampling: SamplingParams) -> bool:
    return sampling.allowed_token_ids is not None or bool(sampling.banned_token_ids)


def _write_mask(words: np.ndarray, sampling: SamplingParams, vocab: int) -> None:
    """Sets and clears the bits of ids; those past the vocabulary stay as they are."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    bits[:vocab] = sampling.allowed_token_ids is None
    if sampling.allowed_token_ids is not None:
        bits[list(sampling.allowed_token_ids)] = 1
    bits[list(sampling.banned_token_ids)] = 0
    words[:] = np.packbits(bits, bitorder="little").view("<i4")

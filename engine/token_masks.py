"""Sets of token ids as bits: id i is bit i % 32 of word i // 32. NumPy only.

The words are int32, as uploads carry them and llguidance writes them.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32

from .sampling_params import SamplingParams

Mask = Int32[np.ndarray, " words"]

WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // WORD_BITS)


def has_id(mask: Mask, token_id: int) -> bool:
    """Whether an id is in the mask."""
    return bool(mask[token_id // WORD_BITS] >> token_id % WORD_BITS & 1)


def ids_mask(sampling: SamplingParams, vocab_size: int) -> Mask | None:
    """The ids that allowed_token_ids and banned_token_ids leave; None: all."""
    allowed, banned = sampling.allowed_token_ids, sampling.banned_token_ids
    if allowed is None and not banned:
        return None
    bits = np.zeros(vocab_size, bool) if allowed is not None else np.ones(vocab_size, bool)
    if allowed is not None:
        bits[list(allowed)] = True
    bits[list(banned)] = False
    return _pack(bits)


def without_ids(mask: Mask, token_ids: Iterable[int]) -> Mask:
    """The mask less these ids; a new one."""
    left = mask.copy()
    words = left.view(np.uint32)
    for token_id in token_ids:
        words[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)
    return left


def with_ids(mask: Mask, token_ids: Iterable[int]) -> Mask:
    """The mask and these ids; a new one."""
    joined = mask.copy()
    words = joined.view(np.uint32)
    for token_id in token_ids:
        words[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
    return joined


def _pack(bits: np.ndarray) -> Mask:
    padded = np.zeros(num_words(len(bits)) * WORD_BITS, bool)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32, copy=False)

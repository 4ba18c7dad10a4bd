"""Structured output needs nothing of a tokenizer but what every kind has."""

import random

import numpy as np
import pytest

from octavo.engine.guides import Guides
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.models.tokenizer import load_tokenizer

FOLDERS = ["byte_level_folder", "metaspace_folder", "unigram_folder", "sentencepiece_folder"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_output_is_held_to_a_choice(folder: str, request: pytest.FixtureRequest):
    """Byte-level, with byte fallback, and words: fails if an id stands for other bytes than it adds
    to a text."""
    tokenizer = load_tokenizer(request.getfixturevalue(folder))
    eos = tokenizer.eos_token_ids
    assert eos
    guides = Guides(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=eos)
    rng, choices = random.Random(0), ["a b", "b", "the the"]
    for _ in range(5):
        state, said = guides.start(Guide(kind=GuideKind.REGEX, text="|".join(choices))), b""
        for _ in range(20):
            bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
            token_id = rng.choice(np.flatnonzero(bits).tolist())
            if token_id in eos:
                break
            state.take(token_id)
            said += tokenizer.token_bytes(token_id)
        assert said.decode() in choices

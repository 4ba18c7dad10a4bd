"""Structured output needs nothing of a tokenizer but what every kind has."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from octavo.engine.guided_masks import GuideError
from octavo.engine.guides import Guides
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.models.tokenizer import load_tokenizer

from .tiny_checkpoints import write_unigram_tokenizer

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


@pytest.mark.parametrize(("control", "has_unknown"), [("§", True), ("</s>", False)])
def test_what_the_vocabulary_cannot_spell_ends_no_more_than_its_guide(
    control: str, has_unknown: bool, tmp_path: Path
):
    """llguidance asks for the ids of a text that alone may come, and panics where it gets an error.

    Fails if that gets out: as a reason that tells of our files, or where another way was left.
    """
    write_unigram_tokenizer(tmp_path, control, "ab", has_unknown=has_unknown)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="encode"):  # else it can be spelled after all
        tokenizer.encode(control, add_special_tokens=False)
    ends = tokenizer.eos_token_ids
    guides = Guides(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=ends)
    with pytest.raises(ValueError, match=r"^no token of the vocabulary follows$"):
        guides.check(Guide(kind=GuideKind.CHOICE, text=json.dumps([control])))
    state = guides.start(Guide(kind=GuideKind.CHOICE, text=json.dumps(["ab" + control])))
    for letter in "ab":
        state.mask()
        state.take(tokenizer.encode(letter, add_special_tokens=False)[0])
    with pytest.raises(GuideError, match=r"^no token of the vocabulary follows$"):
        state.mask()

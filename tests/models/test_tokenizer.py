"""What every tokenizer shares."""

import subprocess
import sys

import pytest

from octavo.models.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session", params=["byte_level", "metaspace", "sentencepiece", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(request.getfixturevalue(f"{request.param}_folder"))


@pytest.mark.parametrize("parse_special", [False, True])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, parse_special: bool):
    with pytest.raises(ValueError, match=r"text holds a lone surrogate, U\+DC00, at character 2"):
        tokenizer.encode("ab\udc00", add_special_tokens=True, parse_special=parse_special)


@pytest.mark.parametrize("text", ["", "\0", "\ufeff", "\U0010ffff", " ", "\n"])
def test_odd_texts_are_text(tokenizer: Tokenizer, text: str):
    tokenizer.encode(text, add_special_tokens=True, parse_special=True)


@pytest.mark.parametrize("text", ["<", "<|im_end|>", "</s>", "<|im_", " ", "a", "é"])
def test_long_repetitive_texts_are_encoded(tokenizer: Tokenizer, text: str):
    """Hangs or overflows the stack if anything here is quadratic or recurses once per token."""
    ids = tokenizer.encode(text * 20_000, add_special_tokens=False)
    unknown = tokenizer.encode("<unk>", add_special_tokens=False, parse_special=True)
    assert not (tokenizer.special_token_ids - set(unknown)).intersection(ids)
    tokenizer.encode(text * 20_000, add_special_tokens=False, parse_special=True)


def test_ids_outside_the_vocabulary_have_no_bytes(tokenizer: Tokenizer):
    for token_id in (-1, tokenizer.vocab_size, 2**40):
        assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.decode([-1, tokenizer.vocab_size], skip_special_tokens=False) == ""


def test_front_ends_need_no_jax():
    """The gateway tokenizes and renders chats in a process of its own."""
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "import octavo.models.tokenizer, octavo.models.chat_template, octavo.models.detokenizer"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

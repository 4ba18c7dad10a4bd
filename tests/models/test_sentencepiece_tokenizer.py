"""Tokenizers of a tokenizer.model against the sentencepiece library's own answers."""

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from octavo.models.metadata import CheckpointError
from octavo.models.tokenizer import Tokenizer, load_tokenizer

PIECES = [
    "<|im_start|>",
    "<s>",
    "</s>",
    "<think>",
    "hello",
    " ",
    "  ",
    "\n",
    "The",
    "é",
    "本",
    "\0",
]
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8")), st.lists(st.sampled_from(PIECES)).map("".join)
)


@pytest.fixture(scope="session")
def tokenizer(sentencepiece_folder: Path) -> Tokenizer:
    return load_tokenizer(sentencepiece_folder)


@pytest.fixture(scope="session")
def library(sentencepiece_folder: Path) -> sentencepiece.SentencePieceProcessor:
    model_file = str(sentencepiece_folder / "tokenizer.model")
    return sentencepiece.SentencePieceProcessor(model_file=model_file)


@given(text=TEXTS)
def test_ordinary_text_encodes_as_by_the_library(
    tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor, text: str
):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == library.encode(text)
    assert not tokenizer.special_token_ids.intersection(ids)


@given(text=TEXTS)
def test_text_comes_back(
    tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor, text: str
):
    ids = tokenizer.encode(text, add_special_tokens=True)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded == text.replace("▁", " ")
    assert decoded == library.decode(ids)


def test_control_tokens_are_parsed_when_asked(
    tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor
):
    """Without `legacy`, a space is put before the first text alone."""
    start, end = library.piece_to_id(["<|im_start|>", "<|im_end|>"])
    ids = tokenizer.encode(
        "<|im_start|>user\nhello<|im_end|>", add_special_tokens=True, parse_special=True
    )
    assert ids[:2] == [library.bos_id(), start]
    assert ids[-1] == end
    assert tokenizer.decode(ids[2:-1], skip_special_tokens=True) == "user\nhello"
    pieces = [library.id_to_piece(i) for i in ids[2:-1]]
    assert "".join(pieces) == "user\nhello"  # no space mark before it


def test_legacy_puts_a_space_after_each_control_token(
    sentencepiece_folder: Path, tmp_path: Path, library: sentencepiece.SentencePieceProcessor
):
    folder = changed(sentencepiece_folder, tmp_path, legacy=True)
    text = "<s>hello</s>hello"
    ids = load_tokenizer(folder).encode(text, add_special_tokens=False, parse_special=True)
    hello = library.encode("hello")
    assert ids == [library.bos_id(), *hello, library.eos_id(), *hello]


def test_one_bos_and_what_the_config_asks_for(sentencepiece_folder: Path, tmp_path: Path):
    tokenizer = load_tokenizer(sentencepiece_folder)
    bos = tokenizer.bos_token_id
    assert bos is not None
    for text in ("hello", "<s>hello"):
        ids = tokenizer.encode(text, add_special_tokens=True, parse_special=True)
        assert (ids[0], ids.count(bos)) == (bos, 1)
    without = changed(sentencepiece_folder, tmp_path, add_bos_token=False, add_eos_token=True)
    ids = load_tokenizer(without).encode("hello", add_special_tokens=True)
    assert bos not in ids
    assert {ids[-1]} == tokenizer.eos_token_ids


def test_tokens_added_beside_the_model(sentencepiece_folder: Path, tmp_path: Path):
    """Fine-tuned Llama models keep tokenizer.model and declare their new tokens in the config."""
    size = load_tokenizer(sentencepiece_folder).vocab_size
    declared = {
        str(size): {"content": "<|tool|>", "special": True},
        str(size + 1): {"content": "<call>", "special": False},
    }
    tokenizer = load_tokenizer(
        changed(sentencepiece_folder, tmp_path, added_tokens_decoder=declared)
    )
    assert tokenizer.vocab_size == size + 2
    text = "a<call>b<|tool|>c"
    assert (
        tokenizer.decode(
            tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False
        )
        == text
    )
    assert size + 1 in tokenizer.encode(text, add_special_tokens=False)
    assert size not in tokenizer.encode(text, add_special_tokens=False)
    parsed = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert size in parsed
    assert tokenizer.decode(parsed, skip_special_tokens=True) == "a<call>bc"


def test_files_that_cannot_be_used_are_named(sentencepiece_folder: Path, tmp_path: Path):
    folder = changed(sentencepiece_folder, tmp_path, added_tokens_decoder={"1": {"content": "x"}})
    with pytest.raises(CheckpointError, match=r"declares 'x' as token 1, which is '<s>'"):
        load_tokenizer(folder)
    (folder / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: not a SentencePiece model"):
        load_tokenizer(folder)


def changed(folder: Path, tmp_path: Path, **values: object) -> Path:
    """A copy with other values in tokenizer_config.json."""
    copy = Path(shutil.copytree(folder, tmp_path / "changed"))
    config = copy / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    return copy

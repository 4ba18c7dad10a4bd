"""Tokenizers of a tokenizer.json against the library's own answers for the same file."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, normalizers

from octavo.models.metadata import CheckpointError
from octavo.models.tokenizer import Tokenizer, load_tokenizer

from .tiny_checkpoints import write_unigram_tokenizer

FRAGMENTS = [
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "[INST]",
    "<|im_",
    "end|>",
    "<think>",
    "é!",
]
PIECES = [
    *FRAGMENTS,
    "hello",
    " ",
    "  ",
    "\n",
    "The quick",
    "é",
    "日本",
    "\U0001f469\u200d",
    "▁",
    "7",
]
NO_SPECIAL_TOKENS = {"add_special_tokens": False}
# The library takes this added token's spelling for bytes in GPT-2's alphabet.
LIBRARY_GARBLES = "é!"
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8")), st.lists(st.sampled_from(PIECES)).map("".join)
)


@pytest.fixture(scope="session", params=["byte_level", "metaspace"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def library(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(text=TEXTS)
def test_parsed_text_encodes_as_by_the_library(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str
):
    """Fails if splitting at control tokens ourselves changes anything, the first space included."""
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert ids == library.encode(text, add_special_tokens=False).ids


@given(text=TEXTS)
def test_ordinary_text_never_becomes_a_control_token(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert not tokenizer.special_token_ids.intersection(ids)


@given(text=TEXTS)
def test_text_without_control_tokens_encodes_as_by_the_library(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str
):
    expected = library.encode(text, add_special_tokens=True)
    if not tokenizer.special_token_ids.intersection(
        library.encode(text, add_special_tokens=False).ids
    ):
        assert tokenizer.encode(text, add_special_tokens=True) == expected.ids


@given(text=st.text(st.characters(codec="utf-8")))
def test_text_comes_back(tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str):
    ids = tokenizer.encode(text, add_special_tokens=True)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    if not tokenizer.drops_leading_space:
        assert decoded == text
    elif not text.startswith((" ", "▁")):  # Metaspace puts no second space before the first
        assert decoded == text.replace("▁", " ")
    if LIBRARY_GARBLES not in text:
        assert decoded == library.decode(ids)


@given(text=TEXTS)
def test_control_tokens_come_back_when_asked(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str
):
    ids = tokenizer.encode(text, add_special_tokens=True, parse_special=True)
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    if LIBRARY_GARBLES in text:
        assert LIBRARY_GARBLES in decoded
    else:
        assert decoded == library.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="session")
def unigram(unigram_folder: Path) -> Tokenizer:
    return load_tokenizer(unigram_folder)


@given(text=st.lists(st.sampled_from([*FRAGMENTS, "a", " "]), min_size=1).map("".join))
def test_vocabulary_that_spells_control_tokens_like_words(unigram: Tokenizer, text: str):
    unknown = {0}  # what text that the vocabulary lacks becomes, by design
    ids = unigram.encode(text, add_special_tokens=False)
    assert not (unigram.special_token_ids - unknown).intersection(ids)


@pytest.mark.parametrize(
    ("control", "has_unknown", "text", "reason"),
    [
        ("§", True, "a§b", "can only encode as a control token"),
        ("</s>", False, "a</s>b", "cannot encode the text"),
        ("</s>", False, "aéb", "cannot encode the text"),
    ],
)
def test_text_that_the_vocabulary_cannot_spell_is_a_value_error(
    control: str, has_unknown: bool, text: str, reason: str, tmp_path: Path
):
    """Which servers refuse. Fails if the library's bare Exception passes for a fault of ours."""
    write_unigram_tokenizer(tmp_path, control, "ab", has_unknown=has_unknown)
    with pytest.raises(ValueError, match=reason):
        load_tokenizer(tmp_path).encode(text, add_special_tokens=False)


def test_why_that_needs_care(unigram_folder: Path):
    """The library answers "</s>" with the token even when told not to look for it."""
    library = tokenizers.Tokenizer.from_file(str(unigram_folder / "tokenizer.json"))
    library.encode_special_tokens = True
    assert library.encode("</s>").ids == [library.token_to_id("</s>")]


def test_settings_of_the_files(byte_level_folder: Path, metaspace_folder: Path):
    plain, llama = load_tokenizer(byte_level_folder), load_tokenizer(metaspace_folder)
    assert (plain.bos_token_id, plain.eos_token_ids) == (3, {4})
    assert plain.chat_template is not None
    assert "<|im_start|>" in plain.chat_template
    assert plain.encode("", add_special_tokens=True) == []
    assert (llama.bos_token_id, llama.eos_token_ids) == (1, {2, 4})  # two files name an EOS
    assert llama.chat_template is not None
    assert llama.chat_template.startswith("{{ bos_token }}")
    assert llama.encode("", add_special_tokens=True) == [1]
    assert llama.special_token_ids == set(range(8))


def test_exactly_one_bos(metaspace_folder: Path):
    """A prompt that spells the BOS and asks for it gets one, not two (vLLM's issue 27515)."""
    tokenizer = load_tokenizer(metaspace_folder)
    spelled = tokenizer.encode("<s>Hello", add_special_tokens=True, parse_special=True)
    assert spelled.count(1) == 1
    assert spelled[0] == 1
    assert tokenizer.encode("<s>Hello", add_special_tokens=True).count(1) == 1


@pytest.fixture
def changed(byte_level_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(byte_level_folder, tmp_path / "changed"))


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_tokenizer_config_decides_about_bos_and_eos(changed: Path):
    change(changed / "tokenizer_config.json", add_bos_token=True, add_eos_token=True)
    ids = load_tokenizer(changed).encode("Hello", add_special_tokens=True)
    assert (ids[0], ids[-1], ids.count(3), ids.count(4)) == (3, 4, 1, 1)


def test_tokenizer_config_can_turn_the_bos_off(metaspace_folder: Path, tmp_path: Path):
    folder = Path(shutil.copytree(metaspace_folder, tmp_path / "changed"))
    change(folder / "tokenizer_config.json", add_bos_token=False)
    assert 1 not in load_tokenizer(folder).encode("Hello", add_special_tokens=True)


def test_truncation_and_padding_of_the_file_are_off(changed: Path):
    """Sentence-embedding models ship tokenizer.json files that cut every text."""
    library = tokenizers.Tokenizer.from_file(str(changed / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=8)
    library.save(str(changed / "tokenizer.json"))
    tokenizer = load_tokenizer(changed)
    assert tokenizer.encode("a", add_special_tokens=False) == [library.token_to_id("a")]
    assert len(tokenizer.encode("quite a long text, really", add_special_tokens=False)) > 4


def test_template_lists_use_the_default_one(changed: Path):
    templates = [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]
    change(changed / "tokenizer_config.json", chat_template=templates)
    assert load_tokenizer(changed).chat_template == "B"


def test_declared_tokens_must_be_those_of_the_vocabulary(changed: Path):
    change(changed / "tokenizer_config.json", added_tokens_decoder={"3": {"content": "<|start|>"}})
    with pytest.raises(CheckpointError, match=r"declares '<\|start\|>' as token 3.*im_start"):
        load_tokenizer(changed)


def test_decoders_that_are_not_concatenation_are_refused(changed: Path):
    library = tokenizers.Tokenizer.from_file(str(changed / "tokenizer.json"))
    library.decoder = decoders.WordPiece()
    library.save(str(changed / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"decoder is .*WordPiece.*must be ByteLevel"):
        load_tokenizer(changed)


def test_special_tokens_of_normalized_text_are_refused(changed: Path):
    library = tokenizers.Tokenizer.from_file(str(changed / "tokenizer.json"))
    library.normalizer = normalizers.Lowercase()
    library.add_special_tokens([tokenizers.AddedToken("<EOT>", normalized=True, special=True)])
    library.save(str(changed / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"'<EOT>' is matched in normalized text"):
        load_tokenizer(changed)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
def test_damaged_files_are_named(changed: Path, content: str):
    (changed / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load_tokenizer(changed)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{", "not readable as JSON"),
        ("tokenizer_config.json", "[]", "holds a list; it must hold an object"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token is 3; it must be a token"),
        (
            "tokenizer_config.json",
            '{"chat_template": ["{{ x }}"]}',
            "chat_template is .* named ones",
        ),
        ("chat_template.jinja", b"\xff", "not readable as text"),
        ("tokenizer_config.json", '{"add_bos_token": "yes"}', "add_bos_token is 'yes'"),
        ("tokenizer_config.json", '{"add_bos_token": true}', "no such token is named"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id is '2'"),
    ],
)
def test_malformed_side_files_are_named(
    changed: Path, name: str, content: str | bytes, message: str
):
    (changed / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=message) as error:
        load_tokenizer(changed)
    assert name in str(error.value)


def test_other_threads_run_while_a_long_text_is_encoded(byte_level_folder: Path) -> None:
    """Fails if the library keeps the GIL: a server's streams would stand still for that long."""
    tokenizer = load_tokenizer(byte_level_folder)
    text = "hello 日本 " * 30_000
    encoding = threading.Thread(target=tokenizer.encode, args=(text,), kwargs=NO_SPECIAL_TOKENS)
    num_turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 20

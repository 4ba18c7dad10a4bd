"""IncrementalDetokenizer against one decode of all bytes, for every way of cutting the ids up."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import override

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.models.detokenizer import IncrementalDetokenizer
from octavo.models.tokenizer import Tokenizer, load_tokenizer

FOLDERS = ["byte_level", "metaspace", "sentencepiece"]


@pytest.fixture(scope="session", params=FOLDERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(request.getfixturevalue(f"{request.param}_folder"))


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_level_folder)


class Bytes:
    """A vocabulary of all bytes, of spaces' special roles, and of one control token."""

    special_token_ids = frozenset({256})

    def __init__(self, *, drops_leading_space: bool = False) -> None:
        self.drops_leading_space = drops_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return b"<ctl>" if token_id == 256 else bytes([token_id]) if token_id < 256 else b""


def stream(
    tokenizer: Tokenizer | Bytes,
    output: Sequence[int],
    *,
    prompt: Sequence[int] = (),
    every: int = 1,
    skip: bool = True,
) -> str:
    """The joined deltas of an output that comes `every` ids at a time."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    starts = range(0, len(output), every)
    deltas = [detokenizer.push(output[start : start + every]) for start in starts]
    return "".join(deltas) + detokenizer.flush()


def expected(
    tokenizer: Tokenizer | Bytes, output: Sequence[int], prompt: Sequence[int], skip: bool
) -> str:
    """What the prompt's and the output's bytes decode to together, less what the prompt's do."""

    def data(ids: Iterable[int]) -> bytes:
        skipped = tokenizer.special_token_ids if skip else ()
        return b"".join(tokenizer.token_bytes(i) for i in ids if i not in skipped)

    before, after = data(prompt), data(output)
    if not after:
        return ""
    if tokenizer.drops_leading_space and not before:
        after = after.removeprefix(b" ")
    pending = next((n for n in (1, 2, 3) if is_unfinished(before[-n:]) and len(before) >= n), 0)
    start = len(before) - pending
    if pending and not (
        is_unfinished(before[start:] + after[:1]) or is_text(before[start:] + after[:1])
    ):
        start = len(before)  # the output does not go on with the prompt's last character
    return (before[start:] + after).decode(errors="replace")


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_unfinished(data: bytes) -> bool:
    """Whether these bytes are the beginning of one character and not the whole of it."""
    if not data or is_text(data):
        return False
    tails = [b"", b"\x80", b"\x80\x80", b"\x90\x80\x80", b"\xa0\x80", b"\x90\x80"]
    return any(is_text(data + tail) and len((data + tail).decode()) == 1 for tail in tails)


IDS = st.lists(st.integers(0, 1 << 30))


@given(output=IDS, prompt=IDS, every=st.integers(1, 9), skip=st.booleans())
def test_any_ids_in_any_pieces(
    tokenizer: Tokenizer, output: list[int], prompt: list[int], every: int, skip: bool
):
    """Random ids over the whole vocabulary: nothing raised, lost, repeated or of the prompt."""
    size = tokenizer.vocab_size + 3  # a few ids beyond it, as padded embeddings have
    output, prompt = [i % size for i in output], [i % size for i in prompt]
    text = stream(tokenizer, output, prompt=prompt, every=every, skip=skip)
    assert text == expected(tokenizer, output, prompt, skip)


BYTE_IDS = st.lists(
    st.one_of(
        st.integers(0, 259),
        st.sampled_from([0x20, 0x41, 0x80, 0xBF, 0xC3, 0xE2, 0xED, 0xEF, 0xF0, 0xF4, 0x9F, 0x98]),
    )
)


@example(output=[0xBD], prompt=[0xEF, 0xBF], every=1, drops=False)  # a true U+FFFD
@example(output=[0xA0], prompt=[0xED], every=1, drops=False)  # half of a surrogate pair
@given(output=BYTE_IDS, prompt=BYTE_IDS, every=st.integers(1, 9), drops=st.booleans())
def test_any_bytes_in_any_pieces(output: list[int], prompt: list[int], every: int, drops: bool):
    """The same with single bytes, where nearly every border lies inside a character."""
    vocabulary = Bytes(drops_leading_space=drops)
    text = stream(vocabulary, output, prompt=prompt, every=every)
    assert text == expected(vocabulary, output, prompt, skip=True)


@pytest.mark.parametrize("split", range(1, 5))
def test_character_that_begins_in_the_prompt_comes_once(split: int):
    """The trigger of vLLM's issue 48853: the prompt ends inside a character."""
    data = list("prompt 👩".encode())
    prompt, output = data[: len(data) - 4 + split], data[len(data) - 4 + split :]
    assert stream(Bytes(), [*output, 0x21], prompt=prompt) == ("👩!" if output else "!")


def test_character_that_the_output_does_not_finish_belongs_to_the_prompt():
    assert stream(Bytes(), list(b"ok"), prompt=list("é".encode())[:1]) == "ok"
    assert stream(Bytes(), [], prompt=list("é".encode())[:1]) == ""


def test_bad_bytes_do_not_stop_the_text():
    """Stray continuation bytes, a lead byte before another one, then text (vLLM's issue 17448)."""
    bad = [0x80, 0xC3, 0xE2, 0x41]
    assert stream(Bytes(), [*bad, *b"then text"]) == "\ufffd\ufffd\ufffdAthen text"


def test_no_delta_holds_half_a_character():
    detokenizer = IncrementalDetokenizer(Bytes())
    deltas = [detokenizer.push([byte]) for byte in "a👩é".encode()]
    assert deltas == ["a", "", "", "", "👩", "", "é"]
    assert detokenizer.flush() == ""


def test_output_that_ends_inside_a_character():
    """One U+FFFD, in the flush of a stream and in a whole text alike."""
    detokenizer = IncrementalDetokenizer(Bytes())
    assert detokenizer.push(list("a👩".encode())[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_emoji_sequence_cut_between_code_points_is_kept():
    family = "👩\u200d👩"
    assert stream(Bytes(), list((family + "\u200d").encode())) == family + "\u200d"


def test_control_tokens_are_left_out_or_spelled():
    ids = [0x41, 256, 0x42]
    assert stream(Bytes(), ids) == "AB"
    assert stream(Bytes(), ids, skip=False) == "A<ctl>B"


def test_leading_space_goes_only_at_the_beginning_of_a_text(sentencepiece_folder: Path):
    """With a prompt the output's first word keeps its space; with none but a BOS it does not."""
    tokenizer = load_tokenizer(sentencepiece_folder)
    bos = tokenizer.bos_token_id
    assert bos is not None
    hello = tokenizer.encode("hello world", add_special_tokens=False)
    assert stream(tokenizer, hello) == "hello world"
    assert stream(tokenizer, hello, prompt=[bos]) == "hello world"
    assert stream(tokenizer, hello, prompt=[bos, *hello]) == " hello world"
    assert stream(tokenizer, [bos, *hello], skip=False) == "<s> hello world"


def test_each_token_is_looked_up_once():
    """A detokenizer that decodes a window or the whole output again would look up more."""

    class Counting(Bytes):
        lookups = 0

        @override
        def token_bytes(self, token_id: int) -> bytes:
            self.lookups += 1
            return super().token_bytes(token_id)

    vocabulary = Counting()
    detokenizer = IncrementalDetokenizer(vocabulary, list(b"a long prompt"))
    before = vocabulary.lookups
    assert before <= 3
    text = "".join(detokenizer.push([byte]) for byte in "日本".encode() * 100)
    assert text == "日本" * 100
    assert vocabulary.lookups - before == 600


@pytest.fixture(scope="session")
def library(byte_level_folder: Path) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_file(str(byte_level_folder / "tokenizer.json"))
    library.encode_special_tokens = True
    return library


@given(text=st.text(st.characters(codec="utf-8")), every=st.integers(1, 9))
def test_equals_the_library_on_text(
    byte_level: Tokenizer, library: tokenizers.Tokenizer, text: str, every: int
):
    ids = library.encode(text).ids
    if "é!" not in text:  # an added token that the library garbles
        assert stream(byte_level, ids, every=every) == library.decode(ids)
    assert stream(byte_level, ids, every=every) == text

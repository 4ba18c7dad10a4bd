"""TokenSplitter against the rules of Hugging Face's AddedVocabulary."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from octavo.models.added_tokens import AddedToken, TokenSplitter


def split(text: str, *tokens: AddedToken) -> list[str | int]:
    parts = TokenSplitter(tokens).split(text)
    return [part.token_id if isinstance(part, AddedToken) else part for part in parts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a", ["a"]),
        ("<s>", [1]),
        ("<s><s>", [1, 1]),
        ("a<s>b", ["a", 1, "b"]),
        ("<<s>", ["<", 1]),
        ("<s", ["<s"]),
        ("<s>>", [2]),  # the longest of those that begin leftmost
        ("<s>>>", [2, ">"]),
    ],
)
def test_leftmost_longest(text: str, expected: list[str | int]):
    tokens = [AddedToken(token_id=1, text="<s>"), AddedToken(token_id=2, text="<s>>")]
    assert split(text, *tokens) == expected


def test_without_tokens_text_stays_whole():
    assert split("a <s> b") == ["a <s> b"]
    assert split("") == []


SPELLINGS = ["<s>", "<s>>", "[A]", "ab", "<", "é"]


@given(
    text=st.lists(st.sampled_from([*SPELLINGS, "<s", "x", " ", "\n ", "\u3000", "_", "Ab"])).map(
        "".join
    ),
    flags=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=6, max_size=6),
)
def test_agrees_with_the_library(text: str, flags: list[tuple[bool, bool, bool]]):
    """Fails if any of the rules (lstrip, rstrip, single_word, order) differs from the library's."""
    tokens = [
        AddedToken(token_id=i, text=spelling, lstrip=left, rstrip=right, single_word=word)
        for i, (spelling, (left, right, word)) in enumerate(zip(SPELLINGS, flags, strict=True))
    ]
    library = tokenizers.Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    library.add_tokens(
        [
            tokenizers.AddedToken(
                token.text,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
                normalized=False,
            )
            for token in tokens
        ]
    )
    by_library_id = {library.token_to_id(token.text): token.token_id for token in tokens}
    expected = [by_library_id.get(i, "?") for i in library.encode(text).ids]
    assert ["?" if isinstance(part, str) else part for part in split(text, *tokens)] == expected

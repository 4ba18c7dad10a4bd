"""Pieces to bytes."""

import pytest
from tokenizers import pre_tokenizers

from octavo.models.piece_bytes import byte_level_bytes, marked_space_bytes


def test_byte_level_alphabet_is_the_librarys():
    """Every character of the library's alphabet is one byte, and all bytes are there."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert {byte_level_bytes(character) for character in alphabet} == {
        bytes([b]) for b in range(256)
    }
    word = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "aé日\n 👩"
    assert byte_level_bytes(word.pre_tokenize_str(text)[0][0]) == text.encode()


def test_pieces_outside_the_alphabet_are_spelled_as_they_are():
    assert byte_level_bytes("日本") == "日本".encode()


@pytest.mark.parametrize(
    ("piece", "data"),
    [
        ("▁the▁end", b" the end"),
        ("<0x00>", b"\0"),
        ("<0xFF>", b"\xff"),
        ("<0xff>", b"<0xff>"),  # SentencePiece writes capitals
        ("<0x0A>x", b"<0x0A>x"),
        ("é", "é".encode()),
    ],
)
def test_sentencepiece_pieces(piece: str, data: bytes):
    assert marked_space_bytes(piece) == data

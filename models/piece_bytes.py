"""How the spelling of a vocabulary entry (a piece) stands for bytes: the two ways in use."""

import re
from collections.abc import Callable
from functools import cache

PieceBytes = Callable[[str], bytes]

# SentencePiece writes a space as U+2581 and a single byte as <0xNN>.
SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a piece in GPT-2's alphabet, in which each byte is written as one character.

    A piece outside that alphabet is an added token, which is spelled as it is.
    """
    alphabet = _byte_level_alphabet()
    try:
        return bytes([alphabet[character] for character in piece])
    except KeyError:
        return piece.encode()


def marked_space_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: a single byte, or text with marked spaces."""
    byte = _BYTE_PIECE.fullmatch(piece)
    if byte:
        return bytes.fromhex(byte.group(1))
    return piece.replace(SPACE_MARK, " ").encode()


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Byte by character: printable Latin-1 stands for itself, the other bytes follow from U+0100.

    Source: `bytes_to_unicode` of GPT-2's encoder.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return alphabet

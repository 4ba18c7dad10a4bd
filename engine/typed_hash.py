"""typed_hash: a digest of parts, each of a kind, that no other list of parts has. No JAX.

Kind and value of every part are preceded by their lengths: what is at the end of one cannot be read
as the beginning of the next, nor a part of one kind as one of another.
"""

import hashlib

DIGEST_BYTES = 16


def typed_hash(*parts: tuple[bytes, bytes]) -> bytes:
    """The digest of (kind, value) parts, in their order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for kind, value in parts:
        digest.update(part_header(kind, len(value)))
        digest.update(value)
    return digest.digest()


def part_header(kind: bytes, num_bytes: int) -> bytes:
    """What is hashed of a part before its value, which has num_bytes."""
    return _length(len(kind)) + kind + _length(num_bytes)


def _length(num_bytes: int) -> bytes:
    return num_bytes.to_bytes(8, "little")

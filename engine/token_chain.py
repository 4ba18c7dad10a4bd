"""TokenChain: a request's tokens as the prefix cache names them, page by page. No JAX.

Each full page has a key that stands for everything up to its end: a hash over the key before it and
the page's own ids. The first key begins with who may share it: tenant, salt, adapter. Parts are
typed (engine/typed_hash.py), so no two different sequences of them are the same bytes. Cases:
a salt that collided with an adapter's name (https://github.com/vllm-project/vllm/issues/44701), an
adapter replaced under its name (https://github.com/vllm-project/vllm/issues/30931).
"""

import hashlib
from array import array
from collections.abc import Iterable

from .typed_hash import DIGEST_BYTES, part_header, typed_hash

_ID_BYTES = array("i").itemsize


def root_key(*, tenant: str, salt: str, adapter: int = 0, family: int = 0) -> bytes:
    """The key before a prompt's first page.

    Args:
      tenant: Whose prompt it is.
      salt: What the request adds; "" is the same as none.
      adapter: Load generation of the adapter that computes the KV, not its name; 0: none.
      family: Names the one request whose choices alone share pages; 0: all requests may.
    """
    return typed_hash(
        (b"tenant", tenant.encode("utf-8", "surrogatepass")),
        (b"salt", salt.encode("utf-8", "surrogatepass")),
        (b"adapter", adapter.to_bytes(8, "little")),
        (b"family", family.to_bytes(8, "little")),
    )


class TokenChain:
    """Grows with the request's outputs. Full pages have keys; the rest at the end has none.

    Attributes:
      root: The key before the first page.
      page_size: Tokens per page.
    """

    def __init__(self, root: bytes, page_size: int, ids: Iterable[int]) -> None:
        """Starts with the ids of the prompt."""
        self.root = root
        self.page_size = page_size
        self._page_bytes = page_size * _ID_BYTES
        self._ids_header = part_header(b"ids", self._page_bytes)  # the same for every page
        self._ids = bytearray()
        self._keys: list[bytes] = []
        self.extend(ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Adds the ids that follow."""
        self._ids += array("i", ids).tobytes()

    @property
    def num_tokens(self) -> int:
        """Ids it holds."""
        return len(self._ids) // _ID_BYTES

    def ids(self, page: int) -> bytes:
        """Ids of a full page, in the bytes of a C int each."""
        return bytes(self._ids[page * self._page_bytes : (page + 1) * self._page_bytes])

    def key(self, page: int) -> bytes:
        """Key of a full page: equal for two chains exactly if all tokens up to its end are."""
        while len(self._keys) <= page:
            parent = self._keys[-1] if self._keys else self.root
            num_full = len(self._ids) // self._page_bytes
            assert len(self._keys) < num_full, "only a full page has a key"
            # The parent's key needs no header: it is always first, and of one length.
            digest = hashlib.blake2b(parent, digest_size=DIGEST_BYTES)
            digest.update(self._ids_header)
            digest.update(self.ids(len(self._keys)))
            self._keys.append(digest.digest())
        return self._keys[page]

    def parent_key(self, page: int) -> bytes:
        """Key of what comes before a page."""
        return self.key(page - 1) if page else self.root


def first_difference(ids: bytes, others: bytes) -> int:
    """How many ids two pages have in common before they differ."""
    ours, theirs = array("i", ids), array("i", others)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            return index
    return len(ours)

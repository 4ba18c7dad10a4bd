"""A digest stands for its parts, their kinds and their order, and for no other parts."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.typed_hash import DIGEST_BYTES, typed_hash

# What a join of kinds and values, with or without lengths, would confuse.
WORDS = st.sampled_from([b"", b"a", b"b", b"ab", b"\0", b"\x01", bytes(8), b"\x01" + bytes(7)])
PARTS = st.lists(st.tuples(WORDS, WORDS), max_size=4)


@given(parts=PARTS, others=PARTS)
def test_digests_are_equal_exactly_if_the_parts_are(
    parts: list[tuple[bytes, bytes]], others: list[tuple[bytes, bytes]]
):
    """Breaks if parts are joined without kind or length."""
    assert (typed_hash(*parts) == typed_hash(*others)) == (parts == others)


def test_what_lies_across_a_border_counts():
    """The same bytes, cut elsewhere."""
    digests = {
        typed_hash((b"a", b"bc")),
        typed_hash((b"ab", b"c")),
        typed_hash((b"a", b"b"), (b"", b"c")),
        typed_hash((b"a", b""), (b"b", b"c")),
    }
    assert len(digests) == 4
    assert all(len(digest) == DIGEST_BYTES for digest in digests)

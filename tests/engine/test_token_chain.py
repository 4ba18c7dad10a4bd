"""Keys stand for everything up to a page's end: who may share it, and every token; nothing else."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.token_chain import TokenChain, first_difference, root_key

ROOT = root_key(tenant="t", salt="")


def chain(ids: list[int], page_size: int = 2, root: bytes = ROOT) -> TokenChain:
    return TokenChain(root, page_size, ids)


def test_roots_differ_unless_tenant_salt_and_adapter_are_the_same():
    """Case 4.3 a, c, d: breaks if parts are joined without kind or length.

    "" is the same as no salt, so that a client cannot miss its own cache by spelling it out.
    """
    words = ["", "X", "a", "b", "ab", "salt", "tenant", "\0", "a\0", "\x01"]
    parts = list(itertools.product(words, words, (0, 1, 256, ord("X"))))
    roots = {root_key(tenant=tenant, salt=salt, adapter=n) for tenant, salt, n in parts}
    assert len(roots) == len(parts)
    assert root_key(tenant="a", salt="") == root_key(tenant="a", salt="", adapter=0)


def test_an_adapter_loaded_again_has_another_root():
    """Case 4.3 b: the generation counts, not the name; breaks if it is cut to few bits."""
    generations = [*range(300), 2**32, 2**63]
    assert len({root_key(tenant="", salt="", adapter=n) for n in generations}) == 302


def test_any_text_can_be_a_tenant():
    """A lone surrogate is text to Python; it must not raise in the engine thread, nor collide."""
    lone, other = root_key(tenant="\ud800", salt=""), root_key(tenant="\ud801", salt="")
    assert lone != other


@given(
    ids=st.lists(st.integers(0, 2), max_size=12),
    others=st.lists(st.integers(0, 2), max_size=12),
    page_size=st.integers(1, 4),
)
def test_keys_are_equal_exactly_if_all_tokens_up_to_the_end_are(
    ids: list[int], others: list[int], page_size: int
):
    """Breaks if a key forgets its ancestors, or depends on what follows the page."""
    one, other = chain(ids, page_size), chain(others, page_size)
    for page, other_page in itertools.product(
        range(len(ids) // page_size), range(len(others) // page_size)
    ):
        end, other_end = (page + 1) * page_size, (other_page + 1) * page_size
        assert (one.key(page) == other.key(other_page)) == (ids[:end] == others[:other_end])


def test_page_size_and_root_are_part_of_every_key():
    """Equal ids in pages of another size are other pages; breaks if only the ids are hashed."""
    ids = [1] * 8
    keys = {
        chain(ids, size, root).key(page)
        for size in (1, 2, 4)
        for root in (ROOT, root_key(tenant="u", salt=""))
        for page in range(8 // size)
    }
    assert len(keys) == 2 * (8 + 4 + 2)


@given(
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=5),
    page_size=st.integers(1, 5),
    asks_early=st.booleans(),
)
def test_extending_by_parts_is_the_same_as_all_at_once(
    ids: list[int], cuts: list[int], page_size: int, asks_early: bool
):
    """Breaks if a key is kept from when its page was not full, or an id is lost at a border."""
    grown = chain([], page_size)
    start = 0
    for end in [*sorted(min(cut, len(ids)) for cut in cuts), len(ids)]:
        grown.extend(ids[start:end])
        start = end
        assert grown.num_tokens == end
        if asks_early and end >= page_size:
            grown.key(end // page_size - 1)
    whole = chain(ids, page_size)
    for page in range(len(ids) // page_size):
        assert grown.key(page) == whole.key(page)
        assert grown.ids(page) == whole.ids(page)
        assert grown.parent_key(page) == (whole.key(page - 1) if page else ROOT)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_only_a_full_page_has_a_key(num_tokens: int):
    """Kept, the key of a part would stand for the page when it is full."""
    part = chain([1] * num_tokens)
    with pytest.raises(AssertionError, match="full"):
        part.key(num_tokens // 2)


def test_first_difference():
    """Breaks if bytes are compared in place of ids: 1 and 257 share their first byte."""
    pages = [chain(ids, 4).ids(0) for ids in ([1, 2, 3, 4], [1, 2, 3, 260], [257, 2, 3, 4])]
    assert first_difference(pages[0], pages[0]) == 4
    assert first_difference(pages[0], pages[1]) == 3
    assert first_difference(pages[0], pages[2]) == 0

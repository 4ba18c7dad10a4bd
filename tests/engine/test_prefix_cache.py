"""Who holds which page, who leaves first, and why a prompt hit no further."""

import pytest

from octavo.engine import prefix_cache
from octavo.engine.prefix_cache import CachedPage, EvictionReason, MissReason, PrefixCache
from octavo.engine.token_chain import TokenChain, root_key

ROOT = root_key(tenant="", salt="")


def chain(*ids: int, root: bytes = ROOT) -> TokenChain:
    """In pages of two."""
    return TokenChain(root, 2, ids)


class Cache:
    """A PrefixCache, and pages for it; checked after every call."""

    def __init__(self, num_pages: int = 100) -> None:
        self.cache = PrefixCache(num_pages)
        self.next_page = 1
        self.next_handle = 0

    def put(self, *ids: int, root: bytes = ROOT, now_s: float = 0.0) -> list[CachedPage]:
        """Publishes all pages of a prompt and lets go of them."""
        nodes, pages = self.hold(*ids, root=root)
        self.release(nodes, pages, now_s)
        return nodes

    def hold(self, *ids: int, root: bytes = ROOT) -> tuple[list[CachedPage], list[int]]:
        """Publishes all pages of a prompt, each from a page of its own; also returns these."""
        nodes: list[CachedPage] = []
        pages: list[int] = []
        for index in range(len(ids) // 2):
            parent = nodes[-1] if nodes else None
            node = self.cache.publish(chain(*ids, root=root), index, parent, self.next_page)
            assert node is not None
            nodes.append(node)
            pages.append(self.next_page)
            self.next_page += 1
        self.cache.check()
        return nodes, pages

    def release(self, nodes: list[CachedPage], pages: list[int], now_s: float = 0.0) -> None:
        self.cache.release(nodes, pages, now_s)
        self.cache.check()

    def take(self, nodes: list[CachedPage]) -> list[int]:
        """Holds what was matched, and reads it where it is."""
        for node in nodes:
            self.cache.hold(node)
        self.cache.check()
        return [node.page for node in nodes if node.page is not None]

    def evict(self) -> CachedPage:
        node = self.cache.device_victim()
        assert node.holders == 0, "a page is taken that is held"
        page = node.page
        assert self.cache.evict(node, EvictionReason.CAPACITY) == page
        self.cache.check()
        return node

    def move_down(self) -> CachedPage:
        node = self.cache.device_victim()
        self.cache.to_host(node, self.next_handle)
        self.next_handle += 1
        self.cache.check()
        return node

    def explain(self, *ids: int, root: bytes = ROOT) -> tuple[MissReason, int]:
        wanted, most = chain(*ids, root=root), (len(ids) - 1) // 2
        num_matched = len(self.cache.match(wanted, most))
        return self.cache.explain(wanted, num_matched, most)


def test_matches_the_longest_run_and_no_more_than_asked():
    cache = Cache()
    nodes = cache.put(1, 2, 3, 4, 5, 6)
    assert cache.cache.match(chain(1, 2, 3, 4, 5, 6), 3) == nodes
    assert cache.cache.match(chain(1, 2, 3, 4, 5, 6), 2) == nodes[:2]
    assert cache.cache.match(chain(1, 2, 3, 4, 9, 9), 3) == nodes[:2]
    assert cache.cache.match(chain(3, 4, 5, 6), 2) == [], "a page does not stand alone"
    assert cache.cache.match(chain(1, 2, 3, 4, root=root_key(tenant="b", salt="")), 2) == []


def _same_key(_: TokenChain, page: int) -> bytes:
    return b"same"


def test_ids_are_compared_on_a_hit(monkeypatch: pytest.MonkeyPatch):
    """With every hash the same, no other prompt's page is read, and none is entered over it."""
    monkeypatch.setattr(TokenChain, "key", _same_key)
    cache = Cache()
    cache.put(1, 2)
    assert len(cache.cache.match(chain(1, 2), 1)) == 1
    assert cache.cache.match(chain(1, 3), 1) == []
    assert cache.cache.publish(chain(1, 3), 0, None, 9) is None
    cache.cache.check()


def test_the_second_of_two_that_computed_the_same_reads_its_own_page():
    """It must not keep the first one's page from others once that has ended.

    Breaks if it does: a request would hold two pages for one that it reads, and could run out of
    pages alone.
    """
    cache = Cache()
    first, first_pages = cache.hold(1, 2, 3, 4)
    second, second_pages = cache.hold(1, 2, 3, 4)
    third, third_pages = cache.hold(1, 2)
    assert second == first
    assert [node.page for node in second] == first_pages
    cache.release(first, first_pages)
    assert sorted(cache.cache.freed_pages) == sorted(first_pages)
    assert first[1].page == second_pages[1]
    assert first[0].page in (second_pages[0], third_pages[0])
    cache.release(third, third_pages)
    cache.release(second, second_pages)
    assert cache.cache.num_unheld == 2
    # What left the cache, with what was never its own, is all but the two that are left.
    assert {node.page for node in first} <= {*second_pages, *third_pages}


def test_a_page_that_nobody_holds_gives_way_to_the_one_computed_anew():
    """A full hit recomputes its last page: the new one stands in, the old one is free at once."""
    cache = Cache()
    (old, *_), old_pages = cache.hold(1, 2)
    cache.release([old], old_pages)
    (new, *_), new_pages = cache.hold(1, 2)
    assert new is old
    assert cache.cache.freed_pages == old_pages
    assert new.page == new_pages[0]
    with pytest.raises(LookupError):
        cache.cache.device_victim()


def test_published_over_a_host_copy_the_copy_is_dropped():
    cache = Cache()
    (node,) = cache.put(1, 2)
    assert cache.move_down() is node
    assert (node.page, node.handle) == (None, 0)
    nodes, pages = cache.hold(1, 2)
    assert nodes == [node]
    assert (node.page, node.handle, node.holders) == (pages[0], None, 1)
    assert cache.cache.dropped_handles == [0]
    assert cache.cache.num_host_pages == 0


def test_never_takes_a_page_that_is_held_or_built_on():
    cache = Cache()
    nodes, pages = cache.hold(1, 2, 3, 4)
    with pytest.raises(LookupError):
        cache.cache.device_victim()
    with pytest.raises(AssertionError):
        cache.cache.evict(nodes[0], EvictionReason.CAPACITY)
    cache.release(nodes, pages)
    held = cache.take(nodes[:1])
    assert cache.evict() is nodes[1]
    with pytest.raises(LookupError):
        cache.cache.device_victim()
    cache.release(nodes[:1], held)
    assert cache.evict() is nodes[0]


def test_leaves_go_in_the_order_of_their_last_use():
    """Breaks if use is counted by entry, or if a parent goes before what is behind it."""
    cache = Cache()
    one = cache.put(1, 1, 1, 2)
    two = cache.put(2, 2)
    three = cache.put(3, 3)
    cache.release(two, cache.take(two))  # used again
    assert [cache.evict() for _ in range(4)] == [one[1], one[0], three[0], two[0]]
    assert cache.cache.evicted == {EvictionReason.CAPACITY: 4}
    assert len(cache.cache) == cache.cache.num_unheld == 0


def test_last_use_is_when_it_was_let_go():
    """From which the age of an evicted page is told."""
    cache = Cache()
    (node,) = cache.put(1, 2, now_s=3.0)
    held = cache.take([node])
    assert node.used_s == 3.0
    cache.release([node], held, now_s=8.0)
    assert node.used_s == 8.0


def test_host_leaves_go_least_recently_used_first_and_children_before_parents():
    cache = Cache()
    nodes = cache.put(1, 2, 3, 4)
    other = cache.put(5, 6)
    for _ in range(3):
        cache.move_down()
    assert cache.cache.num_host_pages == 3
    order: list[CachedPage] = []
    for _ in range(3):
        order.append(victim := cache.cache.host_victim())
        assert cache.cache.evict(victim, EvictionReason.HOST_CAPACITY) is None
        cache.cache.check()
    assert order == [nodes[1], nodes[0], other[0]]
    assert cache.cache.dropped_handles == [0, 1, 2]
    with pytest.raises(LookupError):
        cache.cache.host_victim()


def test_a_page_on_the_device_may_leave_before_its_children_in_host_memory():
    cache = Cache()
    nodes = cache.put(1, 2, 3, 4)
    cache.move_down()
    assert cache.cache.device_victim() is nodes[0], "its child has no device page any more"


@pytest.mark.parametrize(
    ("ids", "reason", "at"),
    [
        pytest.param((1, 2, 3, 4, 5), MissReason.PAGE_BORDER, 4, id="all but a part hit"),
        pytest.param((1, 2, 3, 4), MissReason.PAGE_BORDER, 2, id="the last page is recomputed"),
        pytest.param((1, 2, 3, 9, 5), MissReason.DIFFERENT_TOKEN, 3, id="in a page"),
        pytest.param((1, 2, 8, 9, 5), MissReason.DIFFERENT_TOKEN, 2, id="at its start"),
        pytest.param((9, 9, 9), MissReason.DIFFERENT_TOKEN, 0, id="at the very start"),
        pytest.param((1, 2, 3, 4, 5, 6, 7), MissReason.UNSEEN, 4, id="nothing follows"),
    ],
)
def test_explains_a_miss(ids: tuple[int, ...], reason: MissReason, at: int):
    cache = Cache()
    cache.put(1, 2, 3, 4)
    assert cache.explain(*ids) == (reason, at)


def test_explains_that_nothing_was_there_that_it_was_evicted_or_another_tenants():
    cache = Cache()
    assert cache.explain(1, 2, 3) == (MissReason.UNSEEN, 0)
    cache.put(1, 2, 3, 4)
    other = root_key(tenant="b", salt="")
    assert cache.explain(1, 2, 3, root=other) == (MissReason.SALT, 0)
    cache.evict()
    assert cache.explain(1, 2, 3, 4, 5) == (MissReason.EVICTED, 2)
    assert cache.explain(1, 2, 3, 9, 5) == (MissReason.UNSEEN, 2)
    cache.evict()
    assert cache.explain(1, 2, 3) == (MissReason.EVICTED, 0)
    assert cache.explain(1, 2, 3, root=other) == (MissReason.UNSEEN, 0)
    cache.put(1, 2)
    assert cache.explain(1, 2, 3, 4, 5) == (MissReason.EVICTED, 2), "forgotten with its parent"


def test_what_is_remembered_of_the_past_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """A server evicts for months; check() holds the memory of it to its bound."""
    monkeypatch.setattr(prefix_cache, "MIN_REMEMBERED_EVICTIONS", 8)
    cache = Cache(num_pages=4)
    for number in range(100):
        cache.put(number, number)
        cache.evict()
    assert cache.explain(99, 99, 1)[0] is MissReason.EVICTED
    assert cache.explain(91, 91, 1)[0] is not MissReason.EVICTED
    assert len(cache.cache._roots) == len(cache.cache._first_pages) == 0


def test_heaps_are_bounded_by_what_is_cached():
    """Breaks if each use leaves an entry behind."""
    cache = Cache()
    nodes = cache.put(1, 2, 3, 4)
    for _ in range(1000):
        cache.release(nodes, cache.take(nodes))
    assert len(cache.cache._device_leaves) <= 2 * 2 + 65
    for _ in range(300):
        cache.move_down()
        cache.release(*cache.hold(1, 2, 3, 4))
        cache.cache.dropped_handles.clear()
    assert len(cache.cache._host_leaves) <= 2 * 2 + 65

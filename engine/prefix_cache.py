"""PrefixCache: which pages hold the KV of which tokens, so that none is computed twice. No JAX.

A tree. A node is one full page of tokens behind those of its parent; its key (engine.token_chain)
stands for all of them. A node's KV is in a device page or was moved to host memory. A request holds
the nodes of the pages that it reads or has published, all of them from the root on, so a held
node's ancestors are held as well. Nodes that nobody holds stay until their pages are needed: least
recently used leaves go first.
"""

import enum
import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

from .token_chain import TokenChain, first_difference

MAX_COMPARED_CHILDREN = 64
MIN_REMEMBERED_EVICTIONS = 1024


class EvictionReason(enum.Enum):
    """Why a node left the cache."""

    CAPACITY = "capacity"  # its device page was needed, and there is no host tier
    HOST_CAPACITY = "host_capacity"  # host memory was needed for one used more recently
    BROKEN = "broken"  # logits that came of it were not finite


class MissReason(enum.Enum):
    """Why a prompt hit no further than it did."""

    PAGE_BORDER = "page_border"  # only the last, partial or recomputed page is left
    DIFFERENT_TOKEN = "different_token"  # what follows was cached with another token in it
    EVICTED = "evicted"  # it was there and had to leave
    SALT = "salt"  # it is there for another tenant or under another salt
    UNSEEN = "unseen"  # nothing that follows was ever there
    NOT_READ = "not_read"  # the request does not read the cache
    CHUNK_BORDER = "chunk_border"  # it ends within a chunk, and this engine computes chunks whole
    RECOMPUTED = "recomputed"  # it is in host memory, and computing it again is faster


class CachedPage:
    """One node. Fields are the cache's own; others read them.

    Attributes:
      key: Of all tokens up to its end.
      parent: The node before it; None: it is the first page.
      root: Key of the tenant and salt it belongs to.
      ids: Its tokens, as TokenChain.ids has them.
      page: Device page; None: it is in host memory.
      handle: Name of its copy in host memory, or None.
      holders: Requests that hold it.
      twins: Pages of holders that computed the same tokens themselves; these read their own page.
        All other holders read `page`, and there is at least one, or none holds it.
      children: Nodes behind it, by key.
      num_device_children: Those of them that have a device page.
      used_s: When it was last held.
      stamp: Orders nodes by last use.
    """

    __slots__ = (
        *("key", "parent", "root", "ids", "page", "handle", "holders", "twins", "children"),
        *("num_device_children", "used_s", "stamp"),
    )

    def __init__(
        self, key: bytes, parent: "CachedPage | None", root: bytes, ids: bytes, page: int
    ) -> None:
        """A node that one request holds."""
        self.key = key
        self.parent = parent
        self.root = root
        self.ids = ids
        self.page: int | None = page
        self.handle: int | None = None
        self.holders = 1
        self.twins: list[int] = []
        self.children: dict[bytes, CachedPage] = {}
        self.num_device_children = 0
        self.used_s = 0.0
        self.stamp = 0

    @property
    def is_cached(self) -> bool:
        """It has not left the cache."""
        return self.page is not None or self.handle is not None

    @property
    def is_device_leaf(self) -> bool:
        """Its device page may be taken."""
        return self.page is not None and self.holders == 0 and self.num_device_children == 0

    @property
    def is_host_leaf(self) -> bool:
        """Its copy in host memory may be dropped."""
        return self.handle is not None and not self.children


class PrefixCache:
    """The tree, who holds what of it, and who leaves first.

    It moves no data and owns no free pages: it says which page to take, and its caller
    (engine.kv_memory) does.

    Attributes:
      num_unheld: Device pages that nobody holds: each can be had, leaves first.
      num_host_pages: Nodes whose KV is in host memory.
      evicted: Nodes that left, by reason.
      dropped_handles: Copies in host memory that nothing refers to any more, for the caller to
        take and drop.
      freed_pages: Device pages that another stands in for, for the caller to take and free.
    """

    def __init__(self, num_pages: int) -> None:
        """An empty cache; num_pages, of the device, bounds what is remembered of the past."""
        self.num_unheld = 0
        self.num_host_pages = 0
        self.evicted: Counter[EvictionReason] = Counter()
        self.dropped_handles: list[int] = []
        self.freed_pages: list[int] = []
        self._nodes: dict[bytes, CachedPage] = {}
        self._first_pages: Counter[bytes] = Counter()  # of the ids of first pages
        self._roots: dict[bytes, dict[bytes, CachedPage]] = {}  # first pages by root key
        self._gone: OrderedDict[bytes, EvictionReason] = OrderedDict()  # keys of evicted nodes
        self._max_gone = max(MIN_REMEMBERED_EVICTIONS, num_pages)
        self._last_stamp = 0
        # Leaves by last use. Entries whose node was used since, or is no leaf, are skipped.
        self._device_leaves: list[tuple[int, CachedPage]] = []
        self._host_leaves: list[tuple[int, CachedPage]] = []

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self._nodes)

    def __iter__(self) -> Iterator[CachedPage]:
        """All nodes, the oldest first."""
        return iter(self._nodes.values())

    def match(self, chain: TokenChain, max_pages: int) -> list[CachedPage]:
        """The longest run of cached pages that a chain begins with; those in host memory are last.

        Ids are compared, so no two prompts share pages because their hashes do.
        """
        nodes: list[CachedPage] = []
        for page in range(max_pages):
            node = self._nodes.get(chain.key(page))
            if node is None or node.ids != chain.ids(page):
                break
            nodes.append(node)
        return nodes

    def explain(
        self, chain: TokenChain, num_matched: int, max_pages: int
    ) -> tuple[MissReason, int]:
        """Why a chain of which num_matched pages hit did not hit more, and at which token.

        The answer may tell of other tenants' prompts (SALT): it is for operators, not for clients.
        """
        at = num_matched * chain.page_size
        if num_matched == max_pages:
            return MissReason.PAGE_BORDER, at
        if chain.key(num_matched) in self._gone:
            return MissReason.EVICTED, at
        ids = chain.ids(num_matched)
        siblings = self._siblings(chain.parent_key(num_matched)).values()
        shared = 0
        for node, _ in zip(siblings, range(MAX_COMPARED_CHILDREN), strict=False):
            shared = max(shared, first_difference(ids, node.ids))
        if shared:
            return MissReason.DIFFERENT_TOKEN, at + shared
        if num_matched == 0 and self._first_pages[ids]:
            return MissReason.SALT, 0
        return (MissReason.DIFFERENT_TOKEN if siblings else MissReason.UNSEEN), at

    def hold(self, node: CachedPage) -> None:
        """One more request holds a node, whose ancestors it holds already; it has a device page."""
        assert node.page is not None, "a page in host memory is imported before it is held"
        if node.holders == 0:
            self.num_unheld -= 1
        node.holders += 1

    def release(self, nodes: Sequence[CachedPage], pages: Sequence[int], now_s: float) -> None:
        """A request no longer holds these, which it held from the root on and read in `pages`."""
        for node, page in zip(reversed(nodes), reversed(pages), strict=True):
            if node.page != page:
                node.twins.remove(page)
            node.holders -= 1
            if node.twins and node.holders == len(node.twins):  # nobody reads its page any more
                self.freed_pages.append(self._swap_page(node, node.twins.pop()))
            self._last_stamp += 1
            node.stamp, node.used_s = self._last_stamp, now_s
            if node.holders == 0:
                self.num_unheld += 1
                self._offer_device_leaf(node)

    def publish(
        self, chain: TokenChain, index: int, parent: CachedPage | None, page: int
    ) -> CachedPage | None:
        """Enters page `index` of a chain, whose KV was written and read back by its step.

        Args:
          chain: Of the request that wrote it.
          index: Which of its pages.
          parent: The node before it, which the request holds.
          page: Where its KV is.

        Returns:
          The node, which the request holds from here on. Its page is another one if others read the
          same tokens there: then `page` stays the request's own. None: another page has the same
          hash, and nothing was entered.
        """
        key, ids = chain.key(index), chain.ids(index)
        node = self._nodes.get(key)
        if node is not None and node.ids != ids:
            return None
        if node is not None and node.page is not None:
            # Or the request would keep two pages from others for one that it reads.
            if node.holders:
                node.twins.append(page)
            else:
                self.freed_pages.append(self._swap_page(node, page))
            self.hold(node)
            return node
        if node is None:
            node = CachedPage(key, parent, chain.root, ids, page)
            self._nodes[key] = self._siblings_of(node)[key] = node
            self._gone.pop(key, None)
            if parent is None:
                self._first_pages[ids] += 1
            self._enter_device(node)
        else:  # it was in host memory and was computed again
            self.dropped_handles.append(self.leave_host(node))
            self.to_device(node, page)
        return node

    def _swap_page(self, node: CachedPage, page: int) -> int:
        """Makes `page`, which holds the same, the page of a node; returns the one it had."""
        assert node.page is not None
        old, node.page = node.page, page
        return old

    def leave_host(self, node: CachedPage) -> int:
        """The caller takes over a node's copy in host memory: the handle. Then comes to_device."""
        handle, node.handle = node.handle, None
        assert handle is not None, "there is no copy in host memory"
        self.num_host_pages -= 1
        return handle

    def to_device(self, node: CachedPage, page: int) -> None:
        """The KV of a node without any is in `page` from here on; a request holds it."""
        assert node.page is None
        assert node.handle is None
        node.page, node.holders = page, 1
        self._enter_device(node)

    def device_victim(self) -> CachedPage:
        """The least recently used leaf with a device page; raises LookupError if there is none."""
        return _first_valid(self._device_leaves, lambda node: node.is_device_leaf)

    def host_victim(self) -> CachedPage:
        """The least recently used leaf in host memory; raises LookupError if there is none."""
        return _first_valid(self._host_leaves, lambda node: node.is_host_leaf)

    def to_host(self, node: CachedPage, handle: int) -> int:
        """A device leaf's KV is being moved to host memory; returns the page that it leaves."""
        page = self._leave_device(node)
        node.handle = handle
        self.num_host_pages += 1
        self._offer_host_leaf(node)
        return page

    def evict(self, node: CachedPage, reason: EvictionReason) -> int | None:
        """A leaf leaves the cache; returns the device page that it leaves, if it has one."""
        assert not node.children, "what is behind a node leaves before it"
        page = None if node.page is None else self._leave_device(node)
        if node.handle is not None:
            self.dropped_handles.append(self.leave_host(node))
        del self._nodes[node.key]
        siblings = self._siblings_of(node)
        del siblings[node.key]
        if node.parent is None:
            self._first_pages[node.ids] -= 1
            if not self._first_pages[node.ids]:
                del self._first_pages[node.ids]
            if not siblings:
                del self._roots[node.root]
        else:
            self._offer_host_leaf(node.parent)
        self._gone[node.key] = reason
        if len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)
        self.evicted[reason] += 1
        return page

    def _siblings(self, parent_key: bytes) -> dict[bytes, CachedPage]:
        parent = self._nodes.get(parent_key)
        return self._roots.get(parent_key, {}) if parent is None else parent.children

    def _siblings_of(self, node: CachedPage) -> dict[bytes, CachedPage]:
        if node.parent is None:
            return self._roots.setdefault(node.root, {})
        return node.parent.children

    def _enter_device(self, node: CachedPage) -> None:
        if node.parent is not None:
            node.parent.num_device_children += 1

    def _leave_device(self, node: CachedPage) -> int:
        assert node.is_device_leaf, "a page is taken that is held, or that others build on"
        assert node.page is not None
        page, node.page = node.page, None
        self.num_unheld -= 1
        if node.parent is not None:
            node.parent.num_device_children -= 1
            self._offer_device_leaf(node.parent)
        return page

    def _offer_device_leaf(self, node: CachedPage) -> None:
        if node.is_device_leaf:
            _offer(self._device_leaves, node, self.num_unheld, lambda node: node.is_device_leaf)

    def _offer_host_leaf(self, node: CachedPage) -> None:
        if node.is_host_leaf:
            _offer(self._host_leaves, node, self.num_host_pages, lambda node: node.is_host_leaf)

    def check(self) -> None:
        """Asserts what must hold between any two calls."""
        device = [node for node in self if node.page is not None]
        assert len({node.page for node in device}) == len(device), "a page has two nodes"
        assert self.num_unheld == sum(node.holders == 0 for node in device)
        assert self.num_host_pages == sum(node.handle is not None for node in self)
        for node in self:
            assert (node.page is None) != (node.handle is None), "KV in no place, or in two"
            assert node.holders == 0 or node.page is not None, "held in host memory"
            assert node.holders > len(node.twins) or not node.holders, "held and read by nobody"
            assert node.holders or not node.twins
            assert self._siblings_of(node).get(node.key) is node
            if node.parent is not None:
                assert self._nodes.get(node.parent.key) is node.parent, "a node without a parent"
                assert node.parent.holders >= 1 or node.holders == 0, "held without its parent"
                assert node.page is None or node.parent.page is not None
            children = node.children.values()
            assert node.num_device_children == sum(child.page is not None for child in children)
        device_leaves = {node.key for node in self if node.is_device_leaf}
        host_leaves = {node.key for node in self if node.is_host_leaf}
        for heap, leaves in (
            (self._device_leaves, device_leaves),
            (self._host_leaves, host_leaves),
        ):
            offered = {node.key for stamp, node in heap if stamp == node.stamp}
            assert leaves <= offered, "a leaf is not offered"
        assert len(self._gone) <= self._max_gone
        assert sum(self._first_pages.values()) == sum(node.parent is None for node in self)


def _offer(
    heap: list[tuple[int, CachedPage]],
    node: CachedPage,
    num_valid: int,
    is_valid: Callable[[CachedPage], bool],
) -> None:
    """Enters a leaf; forgets what is out of date once it is the most."""
    heapq.heappush(heap, (node.stamp, node))
    if len(heap) > 2 * num_valid + 64:
        # By key once only those that count are left: an evicted node's may have come back.
        heap[:] = {
            node.key: (stamp, node)
            for stamp, node in heap
            if stamp == node.stamp and is_valid(node)
        }.values()
        heapq.heapify(heap)


def _first_valid(
    heap: list[tuple[int, CachedPage]], is_valid: Callable[[CachedPage], bool]
) -> CachedPage:
    """The leaf used least recently. It stays in the heap: what is done to it makes it invalid."""
    while heap:
        stamp, node = heap[0]
        if stamp == node.stamp and is_valid(node):
            return node
        heapq.heappop(heap)
    raise LookupError("no page can be taken")

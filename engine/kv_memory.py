"""KVMemory: who gets which page. The pool, the prefix cache above it, host memory below it. No JAX.

A device page is free, or one request's own, or the cache's. A request's first pages are the cache's
(`RequestState.held`), the others its own. What a step must copy between device and host before it
runs collects in `transfers`, in order.

Host memory is the cache's, or, in a deterministic engine, that of preempted requests
(`RequestState.copies`).
"""

from collections import Counter
from collections.abc import Sequence

from .cache_hits import Hit, explain_miss, find_hit
from .events import DetailValue, Event, EventKind
from .page_pool import PagePool
from .prefix_cache import CachedPage, EvictionReason, MissReason, PrefixCache
from .schedule import RequestState, Transfer, TransferKind
from .step_costs import PromptCosts
from .token_chain import TokenChain

_NEVER = 1 << 62


class KVMemory:
    """The pages of one engine.

    Attributes:
      transfers: Copies that must be dispatched, in this order, before the next step.
      events: Evictions and exports, for whoever keeps them.
      exported_pages, imported_pages: Counted from the start.
      num_swapped_pages: Copies of preempted requests' pages in host memory.
      evicted_age_s: Seconds since their last use, summed over the pages that left the cache.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        max_host_pages: int,
        costs: PromptCosts,
        keeps_events: bool = True,
        grid_tokens: int | None = None,
    ) -> None:
        """Every page is free.

        Args:
          num_pages: Of the device, page 0 included.
          page_size: Tokens per page.
          max_host_pages: That host memory holds; 0: evicted pages are dropped.
          costs: Says whether bringing a page back is faster than computing it again.
          keeps_events: Whether evictions and exports are recorded.
          grid_tokens: Of a deterministic engine: prompts are computed in chunks that begin at
            multiples of this, a multiple of page_size. So hits end there; only prompts are
            published, since outputs are computed otherwise; and host memory is for `swap_out`
            alone. None: of any other engine.
        """
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(num_pages)
        self.transfers: list[Transfer] = []
        self.events: list[Event] = []
        self.exported_pages = 0
        self.evicted_age_s = dict.fromkeys(EvictionReason, 0.0)
        self.imported_pages = 0
        self.num_swapped_pages = 0
        self._page_size = page_size
        self._grid_pages = None if grid_tokens is None else grid_tokens // page_size
        self._max_host_pages = max_host_pages
        self._max_cached_on_host = max_host_pages if grid_tokens is None else 0
        self._costs = costs
        self._keeps_events = keeps_events
        self._num_handles = 0

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free, or cached and held by nobody."""
        return self.pool.num_free + self.cache.num_unheld

    @property
    def num_host_pages(self) -> int:
        """Pages in host memory."""
        return self.cache.num_host_pages + self.num_swapped_pages

    @property
    def num_swap_room(self) -> int:
        """Pages that can be swapped out, in a deterministic engine."""
        return self._max_host_pages - self.num_swapped_pages

    def pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self._page_size)

    def num_publishable(self, state: RequestState, num_tokens: int) -> int:
        """Full pages of a request's first num_tokens tokens that others may read."""
        if self._grid_pages is not None:
            num_tokens = min(num_tokens, len(state.request.prompt_token_ids))
        return num_tokens // self._page_size

    def lookup(self, state: RequestState, num_tokens: int) -> Hit:
        """What the cache has of a request's first num_tokens tokens; changes nothing.

        The last token is always computed, for its logits, in a page of the request's own; so a hit
        ends before it. And one more where penalties look at the history: that may take more than
        one step to enter, the first of which comes with tokens, but not the last one.
        """
        chain, request = self._extend(state, num_tokens), state.request
        if chain is None or not request.reads_prefix_cache or request.sampling.prompt_logprobs:
            return Hit(on_device=[], on_host=[])
        num_kept = 2 if request.sampling.has_penalties else 1
        max_pages = max(num_tokens - num_kept, 0) // self._page_size
        return find_hit(
            self.cache, chain, max_pages, grid_pages=self._grid_pages, costs=self._costs
        )

    def explain(self, state: RequestState, hit: Hit) -> tuple[MissReason, int]:
        """Why a hit ends where it does: see explain_miss."""
        has_grid = self._grid_pages is not None
        return explain_miss(self.cache, state.chain, hit, has_grid=has_grid)

    def num_needed(self, hit: Hit, num_tokens: int) -> int:
        """Of num_available, what a request takes that has a hit and computes num_tokens tokens."""
        return self.pages(num_tokens) - len(hit.on_device) + hit.num_unheld

    def num_gained(self, hit: Hit, leavers: Sequence[RequestState]) -> int:
        """Pages more for a request with a hit, beyond num_needed, once these gave back all theirs.

        Not what others hold as well, nor what of the hit it would only hold in their place.
        """
        held = Counter(node for state in leavers for node in state.held)
        left = Counter(page for state in leavers for page in state.page_ids)
        readers = {node.page: node.holders - len(node.twins) for node in held}
        freed = sum(count == readers.get(page, 1) for page, count in left.items())
        return freed - sum(0 < node.holders == held[node] for node in hit.on_device)

    def take(self, state: RequestState, hit: Hit, num_tokens: int, now_s: float) -> None:
        """Gives a request the pages of num_tokens tokens, of which it need not compute the hit's.

        Raises:
          ValueError: There are too few.
        """
        for node in hit.on_device:
            self.cache.hold(node)
            state.page_ids.append(_page_of(node))
        # They leave host memory before room is made, so that making room cannot drop them.
        handles = [self.cache.leave_host(node) for node in hit.on_host]
        pages = self._allocate(self.pages(num_tokens) - len(hit.on_device), now_s)
        for node, handle, page in zip(hit.on_host, handles, pages, strict=False):
            self.cache.to_device(node, page)
            self.transfers.append(Transfer(TransferKind.IMPORT, page, handle))
        self.imported_pages += len(handles)
        state.page_ids += pages
        state.held = [*hit.on_device, *hit.on_host]
        num_cached = hit.num_pages * self._page_size
        state.num_computed_tokens = state.num_committed_tokens = state.first_computed = num_cached
        self._set_publish_at(state)

    def grow(self, state: RequestState, now_s: float) -> None:
        """Gives a request one more page; raises ValueError if there is none."""
        state.page_ids += self._allocate(1, now_s)

    def publish(self, state: RequestState) -> None:
        """Enters a request's full pages that committed steps have written into the cache."""
        chain = self._extend(state, state.num_committed_tokens)
        num_full = self.num_publishable(state, state.num_committed_tokens)
        while chain is not None and len(state.held) < num_full:
            index = len(state.held)
            parent = state.held[-1] if state.held else None
            node = self.cache.publish(chain, index, parent, state.page_ids[index])
            if node is None:
                state.chain = chain = None  # its further pages would hang on another's tokens
            else:
                state.held.append(node)
        self._set_publish_at(state)
        self._free_spares()
        self._drop_copies()

    def _set_publish_at(self, state: RequestState) -> None:
        size = self._page_size
        next_at = (state.num_committed_tokens // size + 1) * size
        is_shared = self.num_publishable(state, next_at) * size == next_at
        state.publish_at = next_at if state.chain is not None and is_shared else _NEVER

    def release(self, state: RequestState, now_s: float) -> None:
        """Takes all pages of a request; what it published stays in the cache."""
        own = [
            page
            for index, page in enumerate(state.page_ids)
            if index >= len(state.held) or state.held[index].page != page
        ]
        self.pool.free(reversed(own))
        self.cache.release(state.held, state.page_ids[: len(state.held)], now_s)
        self._free_spares()
        state.page_ids.clear()
        # In their order, and what is there once: a node that it held before at the same place is
        # this one, or has left the cache.
        state.released = [*state.held, *state.released[len(state.held) :]]
        state.held.clear()

    def forget(self, state: RequestState, now_s: float) -> None:
        """Takes all nodes that a request ever held out of the cache, as far as nobody needs them.

        After it was released, for one whose KV is not to be trusted: whoever sends the same prompt
        again shall not get the same fault. It may have been released before its fault was read:
        because it was preempted, or because it needed no further step.
        """
        for node in reversed(state.released):
            if not node.is_cached:
                continue
            if node.holders or node.children:
                break
            self._record_eviction(EvictionReason.BROKEN, now_s - node.used_s, now_s)
            page = self.cache.evict(node, EvictionReason.BROKEN)
            if page is not None:
                self.pool.free([page])
        self._drop_copies()

    def swap_out(self, state: RequestState, now_s: float) -> None:
        """Takes all pages of a request and keeps their KV in host memory.

        It publishes nothing from here on, and reads nothing of the cache: its pages are its own.

        Raises:
          ValueError: Host memory has no room. Nothing was taken.
        """
        pages = state.page_ids[: self.pages(state.num_computed_tokens)]
        if len(pages) > self.num_swap_room:
            raise ValueError(
                f"{len(pages)} pages to swap out; there is room for {self.num_swap_room}"
            )
        state.copies = [self._export(page) for page in pages]
        self.num_swapped_pages += len(pages)
        state.chain = None
        self.release(state, now_s)

    def swap_in(self, state: RequestState, num_tokens: int, now_s: float) -> None:
        """Gives a request that was swapped out the pages of num_tokens tokens, with its KV.

        Raises:
          ValueError: There are too few.
        """
        state.page_ids += self._allocate(self.pages(num_tokens), now_s)
        for page, handle in zip(state.page_ids, state.copies, strict=False):
            self.transfers.append(Transfer(TransferKind.IMPORT, page, handle))
        self.imported_pages += len(state.copies)
        self._forget_copies(state)
        state.first_computed = state.num_computed_tokens
        self._set_publish_at(state)

    def drop_copies(self, state: RequestState) -> None:
        """Forgets the KV of a request that ends while it is swapped out."""
        self.transfers += [Transfer(TransferKind.DROP, 0, handle) for handle in state.copies]
        self._forget_copies(state)

    def _forget_copies(self, state: RequestState) -> None:
        self.num_swapped_pages -= len(state.copies)
        state.copies.clear()

    def _extend(self, state: RequestState, num_tokens: int) -> TokenChain | None:
        """The chain of a request, which reaches that far; None if it is not to be cached."""
        chain = state.chain
        if chain is not None and chain.num_tokens < num_tokens:
            chain.extend(state.tokens_between(chain.num_tokens, num_tokens))
        return chain

    def _allocate(self, count: int, now_s: float) -> list[int]:
        while self.pool.num_free < count:
            try:
                node = self.cache.device_victim()
            except LookupError:
                raise ValueError(
                    f"{count} pages are needed; {self.num_available} are left"
                ) from None
            self.pool.free([self._evict(node, now_s)])
        return self.pool.allocate(count)

    def _evict(self, node: CachedPage, now_s: float) -> int:
        """Moves a leaf's KV down or drops it; returns the device page that it leaves."""
        age_s = now_s - node.used_s
        if not self._max_cached_on_host:
            self._record_eviction(EvictionReason.CAPACITY, age_s, now_s)
            page = self.cache.evict(node, EvictionReason.CAPACITY)
            assert page is not None
            return page
        assert node.page is not None
        page = self.cache.to_host(node, self._export(node.page))
        self._record(EventKind.EXPORTED, now_s, age_s=age_s)
        while self.cache.num_host_pages > self._max_cached_on_host:
            victim = self.cache.host_victim()
            self._record_eviction(EvictionReason.HOST_CAPACITY, now_s - victim.used_s, now_s)
            self.cache.evict(victim, EvictionReason.HOST_CAPACITY)
        self._drop_copies()
        return page

    def _export(self, page: int) -> int:
        """Copies a page to host memory, under the handle that is returned."""
        handle = self._num_handles
        self._num_handles += 1
        self.transfers.append(Transfer(TransferKind.EXPORT, page, handle))
        self.exported_pages += 1
        return handle

    def _free_spares(self) -> None:
        self.pool.free(self.cache.freed_pages)
        self.cache.freed_pages.clear()

    def _drop_copies(self) -> None:
        for handle in self.cache.dropped_handles:
            self.transfers.append(Transfer(TransferKind.DROP, 0, handle))
        self.cache.dropped_handles.clear()

    def _record_eviction(self, reason: EvictionReason, age_s: float, now_s: float) -> None:
        self.evicted_age_s[reason] += age_s
        self._record(EventKind.EVICTED, now_s, reason=reason.value, age_s=age_s)

    def _record(self, kind: EventKind, now_s: float, **detail: DetailValue) -> None:
        if self._keeps_events:
            self.events.append(Event(now_s, kind, "", dict(detail)))

    def check(self, holders: list[RequestState], swapped: Sequence[RequestState] = ()) -> None:
        """Asserts that every page is free, one request's own, or the cache's; and who holds what.

        Args:
          holders: Every request that has pages.
          swapped: Every request whose KV is in host memory.
        """
        copies = [handle for state in swapped for handle in state.copies]
        assert len(set(copies)) == len(copies) == self.num_swapped_pages, "a copy is lost, or two's"
        assert self.num_host_pages <= self._max_host_pages, "more is on the host than may be"
        self.pool.check()
        self.cache.check()
        cached = {node.page for node in self.cache if node.page is not None}
        held: dict[bytes, int] = {}
        twins: dict[bytes, list[int]] = {}
        own: list[int] = []
        for state in holders:
            for index, page in enumerate(state.page_ids):
                if index >= len(state.held):
                    own.append(page)
                elif state.held[index].page != page:
                    own.append(page)
                    twins.setdefault(state.held[index].key, []).append(page)
                else:
                    assert page in cached, "a page is read that the cache gave away"
            for node in state.held:
                held[node.key] = held.get(node.key, 0) + 1
        assert len(set(own)) == len(own), "a page is two requests' own"
        assert not set(own) & cached, "a page is a request's own and the cache's"
        assert self.pool.taken() == set(own) | cached, "a page is lost, or in use and free"
        for node in self.cache:
            assert node.holders == held.get(node.key, 0), "a page is not held as often as it says"
            assert sorted(node.twins) == sorted(twins.get(node.key, []))
        assert self.cache.num_host_pages <= self._max_cached_on_host
        assert not self.cache.dropped_handles
        assert not self.cache.freed_pages


def _page_of(node: CachedPage) -> int:
    assert node.page is not None
    return node.page

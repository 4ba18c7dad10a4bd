"""Pages between pool, cache and host memory. Host pages come back in the order that keeps them."""

import pytest

from octavo.engine.cache_hits import Hit
from octavo.engine.events import EventKind
from octavo.engine.kv_memory import KVMemory
from octavo.engine.prefix_cache import MissReason
from octavo.engine.schedule import RequestState, Transfer, TransferKind
from octavo.engine.token_chain import TokenChain, root_key

from .fakes import planned_costs, request, small_config

EXPORT, IMPORT, DROP = TransferKind.EXPORT, TransferKind.IMPORT, TransferKind.DROP


class Memory:
    """A KVMemory with pages of two tokens, checked after every call."""

    def __init__(self, num_usable: int, max_host_pages: int = 0, import_s: float = 0.0) -> None:
        costs = planned_costs(small_config(), import_s=import_s)
        self.memory = KVMemory(num_usable + 1, 2, max_host_pages=max_host_pages, costs=costs)
        self.holders: list[RequestState] = []

    def state(self, *prompt: int, is_cached: bool = True, **changes: bool) -> RequestState:
        state = RequestState(request=request("r", prompt, **changes), max_tokens=99, stop_ids=())
        if is_cached:
            root = root_key(tenant=state.request.tenant, salt=state.request.cache_salt)
            state.chain = TokenChain(root, 2, prompt)
        return state

    def lookup(self, state: RequestState) -> Hit:
        return self.memory.lookup(state, len(state.request.prompt_token_ids))

    def take(self, state: RequestState, now_s: float = 0.0) -> Hit:
        hit = self.lookup(state)
        self.memory.take(state, hit, len(state.request.prompt_token_ids), now_s)
        self.holders.append(state)
        self.check()
        return hit

    def publish(self, state: RequestState, num_committed: int | None = None) -> None:
        length = len(state.request.prompt_token_ids)
        state.num_committed_tokens = length if num_committed is None else num_committed
        self.memory.publish(state)
        self.check()

    def release(self, state: RequestState, now_s: float = 0.0) -> None:
        self.memory.release(state, now_s)
        self.holders.remove(state)
        self.check()

    def run(self, *prompt: int, now_s: float = 0.0) -> Hit:
        """A request from its start to its end; what it could read."""
        return self.run_state(self.state(*prompt), now_s)

    def run_state(self, state: RequestState, now_s: float = 0.0) -> Hit:
        hit = self.take(state, now_s)
        self.publish(state)
        self.release(state, now_s)
        return hit

    def transfers(self) -> list[Transfer]:
        transfers = list(self.memory.transfers)
        self.memory.transfers.clear()
        return transfers

    def events(self, kind: EventKind) -> list[dict[str, object]]:
        return [dict(event.detail) for event in self.memory.events if event.kind is kind]

    def check(self) -> None:
        self.memory.check(self.holders)


def test_a_page_is_read_only_after_it_was_published():
    """Case 4.1: what is taken, or computed but not committed, is nobody else's to read."""
    memory = Memory(9)
    writer, reader = memory.state(1, 2, 3, 4, 5), memory.state(1, 2, 3, 4, 5)
    memory.take(writer)
    assert memory.lookup(reader).num_pages == 0
    writer.num_computed_tokens = 5
    memory.publish(writer, num_committed=3)
    assert memory.lookup(reader).num_pages == 1, "a page counts once it is full and committed"
    memory.release(writer)
    assert memory.lookup(reader).num_pages == 1


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_a_hit_leaves_the_last_token_to_compute(length: int, pages: int):
    """Case 4.2: without a token to run there are no logits."""
    memory = Memory(9)
    memory.run(1, 2, 3, 4, 5, 6)
    state = memory.state(*range(1, length + 1))
    assert memory.take(state).num_pages == pages
    assert state.num_computed_tokens == state.first_computed == 2 * pages
    assert len(state.page_ids) == -(-length // 2)


def test_what_is_computed_again_is_in_a_page_of_its_own():
    """Case 4.2: a full hit must not write into a page that others read."""
    memory = Memory(9)
    first = memory.state(1, 2, 3, 4)
    memory.take(first)
    memory.publish(first)
    second = memory.state(1, 2, 3, 4)
    memory.take(second)
    assert second.page_ids[0] == first.page_ids[0]
    assert second.page_ids[1] != first.page_ids[1]
    memory.publish(second)
    memory.release(first)
    assert second.held[1].page == second.page_ids[1], "the first one's page is kept for nobody"
    memory.release(second)
    assert memory.memory.num_available == 9
    assert len(memory.memory.cache) == 2


def test_a_request_alone_never_takes_more_pages_than_its_tokens():
    """It computes what is cached, and may keep only one of the two copies.

    Breaks if publishing holds the other copy as well: it would run out of pages that it was
    promised, and preempt itself.
    """
    memory = Memory(4)
    memory.run(1, 2, 3, 4)
    state = memory.state(1, 2, 3, 4, 5, reads_prefix_cache=False)
    memory.take(state)
    memory.publish(state, num_committed=4)
    memory.memory.grow(state, 0.0)
    memory.check()
    assert memory.memory.num_available == 0


@pytest.mark.parametrize("is_scored", [True, False], ids=["prompt_logprobs", "asked not to"])
def test_some_requests_only_write(is_scored: bool):
    """Case 4.5: prompt log-probabilities need every token computed."""
    memory = Memory(9)
    first, second = (
        memory.state(1, 2, 3, 4, 5, prompt_logprobs=is_scored, reads_prefix_cache=is_scored)
        for _ in range(2)
    )
    hit = memory.run_state(first)
    assert memory.memory.explain(first, hit) == (MissReason.NOT_READ, 0)
    assert memory.run_state(second).num_pages == 0
    assert memory.run(1, 2, 3, 4, 5).num_pages == 2


def test_without_a_chain_nothing_is_read_or_written():
    memory = Memory(9)
    memory.run_state(memory.state(1, 2, 3, is_cached=False))
    assert len(memory.memory.cache) == 0
    memory.run(1, 2, 3)
    assert memory.run_state(memory.state(1, 2, 3, is_cached=False)).num_pages == 0


def _page_as_key(_: TokenChain, page: int) -> bytes:
    return bytes([page])


def test_a_request_whose_hash_is_anothers_goes_on_uncached(monkeypatch: pytest.MonkeyPatch):
    """Its later pages must not hang behind the other's."""
    monkeypatch.setattr(TokenChain, "key", _page_as_key)
    memory = Memory(9)
    memory.run(1, 2, 3, 4)
    state = memory.state(1, 9, 3, 4, 5)
    assert memory.take(state).num_pages == 0
    memory.publish(state)
    assert state.chain is None
    assert state.held == []
    memory.release(state)
    assert memory.memory.num_available == 9


def test_evicts_the_least_recently_used_leaf_and_says_why_and_how_old():
    memory = Memory(3)
    memory.run(1, 1, now_s=1.0)
    memory.run(2, 2, now_s=2.0)
    memory.run(3, 3, 4, 4, now_s=5.0)  # needs a page of them
    assert memory.events(EventKind.EVICTED) == [{"reason": "capacity", "age_s": 4.0}]
    assert memory.transfers() == []
    assert memory.lookup(memory.state(1, 1, 0)).num_pages == 0
    assert memory.lookup(memory.state(2, 2, 0)).num_pages == 1


def test_too_few_pages_is_an_error_that_names_both():
    memory = Memory(2)
    memory.take(memory.state(1, 2, 3))
    with pytest.raises(ValueError, match="1 pages are needed; 0 are left"):
        memory.memory.grow(memory.holders[0], 0.0)
    memory.check()


def test_counts_what_a_hit_takes_of_what_is_available():
    """A cached page that nobody holds is available, until the hit holds it."""
    memory = Memory(4)
    memory.run(1, 2, 3, 4)
    state = memory.state(1, 2, 3, 4, 5)
    hit = memory.lookup(state)
    assert (memory.memory.num_available, memory.memory.num_needed(hit, 5)) == (4, 3)
    memory.take(state)
    assert memory.memory.num_available == 1
    other = memory.state(1, 2, 3, 4, 5)
    assert memory.memory.num_needed(memory.lookup(other), 5) == 1
    memory.take(other)
    assert memory.memory.num_available == 0


def test_evicted_pages_go_down_and_come_back():
    memory = Memory(3, max_host_pages=5)
    memory.run(1, 2, 3, 4, now_s=1.0)
    other = memory.state(9, 9, 9, 9, 9, 9)
    memory.take(other, now_s=4.0)
    exports = memory.transfers()
    assert [transfer.kind for transfer in exports] == [EXPORT, EXPORT]
    assert memory.events(EventKind.EXPORTED) == [{"age_s": 3.0}] * 2
    assert memory.memory.cache.num_host_pages == 2
    memory.release(other)
    state = memory.state(1, 2, 3, 4, 5)
    hit = memory.take(state)
    assert [len(hit.on_device), len(hit.on_host)] == [0, 2]
    assert state.num_computed_tokens == 4
    imports = memory.transfers()
    assert [transfer.kind for transfer in imports] == [IMPORT, IMPORT]
    # Leaves went down first, and come back behind their parents; each under its own handle.
    assert [t.handle for t in imports] == [t.handle for t in reversed(exports)]
    assert [t.page for t in imports] == state.page_ids[:2]
    assert memory.memory.cache.num_host_pages == 0
    assert (memory.memory.exported_pages, memory.memory.imported_pages) == (2, 2)


def test_host_memory_is_not_exceeded_and_forgets_the_least_recently_used():
    memory = Memory(2, max_host_pages=1)
    for token in (1, 2, 3, 4):
        memory.run(token, token, token, now_s=float(token))
    transfers = memory.transfers()
    assert [t.kind for t in transfers] == [EXPORT, EXPORT, DROP, EXPORT, DROP][: len(transfers)]
    assert memory.events(EventKind.EVICTED)[0] == {"reason": "host_capacity", "age_s": 2.0}
    exported = [t.handle for t in transfers if t.kind is EXPORT]
    assert len(set(exported)) == len(exported), "a handle names two pages"
    assert [t.handle for t in transfers if t.kind is DROP] == exported[:-1]


def test_making_room_for_pages_that_come_back_does_not_drop_them():
    """Host memory is full of them; their device pages must come from evictions that go down."""
    memory = Memory(3, max_host_pages=2)
    memory.run(1, 2, 3, 4, 5)
    memory.run(9, 9, 8, 8, 7, 7)  # takes all pages: two of the first go down
    assert memory.memory.cache.num_host_pages == 2
    memory.transfers()
    state = memory.state(1, 2, 3, 4, 5)
    hit = memory.take(state)
    assert len(hit.on_host) == 2
    transfers = memory.transfers()
    dropped = {t.handle for t in transfers if t.kind is DROP}
    imported = [t for t in transfers if t.kind is IMPORT]
    assert not dropped & {t.handle for t in imported}
    assert [t.page for t in imported] == state.page_ids[:2]
    for at, transfer in enumerate(transfers):
        if transfer.kind is IMPORT:  # what was in the page went down before
            exports = [t.page for t in transfers[at:] if t.kind is EXPORT]
            assert transfer.page not in exports


@pytest.mark.parametrize(("import_s", "imports"), [(0.0, True), (1e9, False)])
def test_comes_back_only_if_that_is_faster_and_the_decision_is_told(import_s: float, imports: bool):
    memory = Memory(3, max_host_pages=5, import_s=import_s)
    memory.run(1, 2, 3, 4)
    memory.run(9, 9, 9, 9, 9, 9)
    state = memory.state(1, 2, 3, 4, 5)
    hit = memory.lookup(state)
    assert hit.decision is not None
    assert hit.decision["imports"] is imports
    assert hit.decision["pages"] == 2
    assert (hit.decision["import_s"] < hit.decision["recompute_s"]) is imports
    assert hit.num_pages == (2 if imports else 0)
    if not imports:
        assert memory.memory.explain(state, hit) == (MissReason.RECOMPUTED, 0)
        memory.take(state)
        memory.transfers()
        memory.publish(state)  # computed again: the copies are of no use
        assert [t.kind for t in memory.transfers()] == [DROP, DROP]
        assert all(node.handle is None for node in state.held)


def test_what_is_gained_of_shared_pages():
    """Two pages are shared, and each has one of its own. A newcomer would only hold the two."""
    memory = Memory(9)
    writer, reader = memory.state(1, 2, 3, 4, 5), memory.state(1, 2, 3, 4, 6)
    memory.take(writer)
    memory.publish(writer)
    memory.take(reader)
    assert _gained(memory, (7, 7, 7), [writer], [reader], [writer, reader]) == [1, 1, 4]
    assert _gained(memory, (1, 2, 3, 4, 7), [writer], [reader], [writer, reader]) == [1, 1, 2]


def test_what_is_gained_of_pages_that_were_computed_twice():
    """Each has three to itself, but one copy of the two that are cached stays."""
    memory = Memory(9)
    first, second = memory.state(1, 2, 3, 4, 5), memory.state(1, 2, 3, 4, 6)
    memory.take(first)
    memory.take(second)
    memory.publish(first)
    memory.publish(second)
    assert _gained(memory, (7, 7, 7), [first], [second], [first, second]) == [3, 3, 6]
    assert _gained(memory, (1, 2, 3, 4, 7), [first], [second], [first, second]) == [3, 3, 4]


def _gained(memory: Memory, prompt: tuple[int, ...], *leavers: list[RequestState]) -> list[int]:
    hit = memory.lookup(memory.state(*prompt))
    return [memory.memory.num_gained(hit, each) for each in leavers]


def test_a_lookup_changes_nothing():
    memory = Memory(3, max_host_pages=2)
    memory.run(1, 2, 3, 4)
    memory.run(9, 9, 9, 9)
    before = [(node.key, node.page, node.handle, node.stamp) for node in memory.memory.cache]
    memory.lookup(memory.state(1, 2, 3, 4, 5))
    assert before == [(n.key, n.page, n.handle, n.stamp) for n in memory.memory.cache]

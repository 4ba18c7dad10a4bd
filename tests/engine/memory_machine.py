"""KVMemory alone, as a Hypothesis state machine: pool, prefix cache and host memory.

A shadow of device and host memory carries out every transfer. What a request or the cache says is
in a page is compared with what was written there, so a page that is given away, copied in the wrong
order, published too early or freed twice shows at once.
"""

from array import array
from typing import override

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from octavo.engine.kv_memory import KVMemory
from octavo.engine.schedule import RequestState, TransferKind
from octavo.engine.token_chain import TokenChain, root_key

from .fakes import planned_costs, request, small_config
from .state_machine import HISTORIES, CountedMachine

type Content = tuple[bytes, tuple[int, ...]]
"""What a page holds: the root key, and all tokens up to its end."""


class MemoryMachine(CountedMachine):
    """Requests that take, write, grow, publish and give back, in any order."""

    @initialize(
        page_size=st.integers(1, 4),
        num_pages=st.integers(3, 14),
        max_host_pages=st.sampled_from([0, 1, 4]),
        is_import_dear=st.booleans(),
    )
    def start(
        self, page_size: int, num_pages: int, max_host_pages: int, is_import_dear: bool
    ) -> None:
        costs = planned_costs(small_config(), import_s=1e9 if is_import_dear else 0.0)
        self.size = page_size
        self.memory = KVMemory(num_pages, page_size, max_host_pages=max_host_pages, costs=costs)
        self.states: list[RequestState] = []
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self.handles: set[int] = set()
        self.now_s = 0.0
        self.num_requests = 0

    @rule(
        history=st.sampled_from(HISTORIES),
        length=st.integers(1, 20),
        tenant=st.sampled_from("aab"),
        reads=st.sampled_from([True, True, True, False]),
        is_scored=st.sampled_from([False, False, False, True]),
    )
    def take(
        self, history: tuple[int, ...], length: int, tenant: str, reads: bool, is_scored: bool
    ) -> None:
        self.count("take")
        wanted = request(
            f"r{self.num_requests}",
            history[:length],
            tenant=tenant,
            reads_prefix_cache=reads,
            prompt_logprobs=is_scored,
        )
        self.num_requests += 1
        state = RequestState(request=wanted, max_tokens=8, stop_ids=(), prefill_end=length)
        state.chain = TokenChain(root_key(tenant=tenant, salt=""), self.size, history[:length])
        hit = self.memory.lookup(state, length)
        assert hit.num_pages * self.size < length, "no token is left to compute"
        assert (reads and not is_scored) or not hit.num_pages
        if self.memory.num_needed(hit, length) <= self.memory.num_available:
            self.memory.take(state, hit, length, self.now_s)
            assert len(state.page_ids) == self.memory.pages(length)
            self.states.append(state)
        self._settle()

    @precondition(lambda self: self.states)
    @rule(which=st.integers(0, 20), length=st.integers(1, 9), publishes=st.booleans())
    def write(self, which: int, length: int, publishes: bool) -> None:
        """A chunk is computed; its step is read (published), or not yet."""
        self.count("write")
        state = self.states[which % len(self.states)]
        end = min(state.num_computed_tokens + length, len(state.page_ids) * self.size)
        have = len(state.request.prompt_token_ids) + len(state.output_token_ids)
        self._write(state, min(end, have))
        if publishes:
            self._publish(state)
        self._settle()

    @precondition(lambda self: self.states)
    @rule(which=st.integers(0, 20), token=st.integers(1, 2))
    def decode(self, which: int, token: int) -> None:
        """A token more, in a page more if the last is full."""
        self.count("decode")
        state = self.states[which % len(self.states)]
        have = len(state.request.prompt_token_ids) + len(state.output_token_ids)
        if state.num_computed_tokens < have:
            return
        if have == len(state.page_ids) * self.size:
            if not self.memory.num_available:
                return
            self.memory.grow(state, self.now_s)
            self._transfer()
        state.output_token_ids.append(token)
        self._write(state, have + 1)
        self._settle()

    @precondition(lambda self: self.states)
    @rule(which=st.integers(0, 20))
    def publish(self, which: int) -> None:
        self.count("publish")
        self._publish(self.states[which % len(self.states)])
        self._settle()

    @precondition(lambda self: self.states)
    @rule(
        which=st.integers(0, 20),
        count=st.sampled_from([1, 1, 2, 3]),
        history=st.sampled_from(HISTORIES),
    )
    def release(self, which: int, count: int, history: tuple[int, ...]) -> None:
        """Some give back what they have, of which was said what a newcomer would have of it."""
        self.count("release")
        memory = self.memory
        newcomer = RequestState(request=request("new", history), max_tokens=8, stop_ids=())
        newcomer.chain = TokenChain(root_key(tenant="a", salt=""), self.size, history)

        def left() -> int:
            hit = memory.lookup(newcomer, len(history))
            return memory.num_available - memory.num_needed(hit, len(history))

        leavers = [self.states.pop(which % len(self.states)) for _ in self.states[:count]]
        expected = left() + memory.num_gained(memory.lookup(newcomer, len(history)), leavers)
        for state in leavers:
            memory.release(state, self.now_s)
        assert left() == expected
        self._settle()

    @override
    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        while self.states:
            self.memory.release(self.states.pop(), self.now_s)
            self._settle()
        assert self.memory.num_available == self.memory.pool.num_usable, "a page leaked"

    def _write(self, state: RequestState, end: int) -> None:
        assert state.chain is not None
        for at in range(state.num_computed_tokens, end):
            page = state.page_ids[at // self.size]
            assert all(node.page != page for node in self.memory.cache), "a shared page is written"
            self.device[page] = state.chain.root, tuple(state.tokens_between(0, at + 1))
        state.num_computed_tokens = max(state.num_computed_tokens, end)

    def _publish(self, state: RequestState) -> None:
        state.num_committed_tokens = state.num_computed_tokens
        self.memory.publish(state)
        assert len(state.held) == state.num_committed_tokens // self.size

    def _transfer(self) -> None:
        """Copies between device and host, in order, before whatever the next step writes."""
        for kind, page, handle in self.memory.transfers:
            match kind:
                case TransferKind.EXPORT:
                    assert handle not in self.handles, "a handle is used twice"
                    self.handles.add(handle)
                    self.host[handle] = self.device[page]
                case TransferKind.IMPORT:
                    self.device[page] = self.host.pop(handle)
                case TransferKind.DROP:
                    del self.host[handle]
        self.memory.transfers.clear()

    def _settle(self) -> None:
        """Carries out the transfers, then compares everything that is said with what is there."""
        self.now_s += 1
        memory = self.memory
        self._transfer()
        memory.events.clear()
        memory.check(self.states)
        said = {node.handle for node in memory.cache if node.handle is not None}
        assert said == set(self.host), "a copy in host memory is lost, or was forgotten"
        for node in memory.cache:
            tokens: list[int] = []
            step = node
            while step is not None:
                tokens[:0] = array("i", step.ids).tolist()
                step = step.parent
            assert node.page is not None or node.handle is not None
            place = self.host[node.handle] if node.page is None else self.device[node.page]
            assert place == (node.root, tuple(tokens)), "the cache lies about a page"
        for state in self.states:
            assert state.chain is not None
            for index in range(state.num_computed_tokens // self.size):
                expected = tuple(state.tokens_between(0, (index + 1) * self.size))
                found = self.device[state.page_ids[index]]
                assert found == (state.chain.root, expected), "a request reads another's page"

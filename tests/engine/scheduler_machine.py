"""The scheduler, as a Hypothesis state machine: all policies, tiny pools, steps read one behind.

Its own invariants are checked after every operation, and what the device is told is followed: which
page each slot's table names, and that no step writes to a page that anybody else may read.
"""

import dataclasses
from typing import override

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from octavo.configs.scheduling_config import PolicyName
from octavo.engine.prefix_cache import CachedPage
from octavo.engine.schedule import RequestState, Schedule

from .fakes import planned_costs, request, small_config, whole_pages
from .state_machine import HISTORIES, CountedMachine, few_entries
from .test_scheduler import Driver

MAX_STEPS = 5_000  # to end what is live when a run ends


class SchedulerMachine(CountedMachine):
    """Adds, removals, steps ahead, reads behind, stops and waits, in any order."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "fair", "deadline"]),
        page_size=st.integers(1, 4),
        num_pages=st.integers(3, 16),
        max_num_seqs=st.integers(1, 10),
        chunk=st.integers(1, 20),
        max_host_pages=st.sampled_from([0, 1, 6, 30]),
        is_import_dear=st.booleans(),
        hit_entries=st.sampled_from([128, 128, 1, 3]),
        max_tenant_running=st.sampled_from([None, 1, 2]),
        inter_token_target_ms=st.sampled_from([None, 1.05]),
        weights=st.sampled_from([(), (("b", 3.0),)]),
        slowness=st.sampled_from([1, 1, 1000]),
        deterministic=st.booleans(),
    )
    def start(
        self,
        policy: PolicyName,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        chunk: int,
        max_host_pages: int,
        is_import_dear: bool,
        hit_entries: int,
        max_tenant_running: int | None,
        inter_token_target_ms: float | None,
        weights: tuple[tuple[str, float], ...],
        slowness: int,
        deterministic: bool,
    ) -> None:
        """`slowness`: a step takes as long as there is between two, so deadlines are missed."""
        self.patch = few_entries(hits=hit_entries)
        self.patch.start()
        config = small_config(
            policy=policy,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            prefill_chunk_tokens=whole_pages(chunk, page_size) if deterministic else chunk,
            max_tenant_running=max_tenant_running,
            inter_token_target_ms=None if deterministic else inter_token_target_ms,
            deterministic=deterministic,
            tenant_weights=weights,
            priority_ageing_s=10.0,
            default_ttft_target_s=10.0,
        )
        costs = planned_costs(config, import_s=1e9 if is_import_dear else 0.0)
        base_s = {key: slowness * base_s for key, base_s in costs.base_s.items()}
        costs = dataclasses.replace(costs, base_s=base_s)
        self.step_s = slowness * 0.001
        self.most = (num_pages - 1) * page_size + 1
        self.driver = Driver(config, num_pages, costs, max_host_pages=max_host_pages)
        self.scheduler = self.driver.scheduler
        self.tables: dict[int, list[int]] = {}
        self.num_computed: dict[RequestState, int] = {}
        self.held: dict[RequestState, set[CachedPage]] = {}
        self.num_added = 0

    @rule(
        history=st.sampled_from(HISTORIES),
        length=st.integers(1, 20),
        max_tokens=st.integers(1, 9),
        tenant=st.sampled_from(["", "", "b", "c"]),
        salt=st.sampled_from(["", "", "", "s"]),
        priority=st.integers(0, 2),
        flags=st.integers(0, 7),
        patience=st.sampled_from([None, None, None, 3, 9]),
    )
    def add(
        self,
        history: tuple[int, ...],
        length: int,
        max_tokens: int,
        tenant: str,
        salt: str,
        priority: int,
        flags: int,
        patience: int | None,
    ) -> None:
        self.count("add")
        now_s = float(self.driver.num_steps)
        prompt = history[: min(length, self.most - 1)]
        one = request(
            f"r{self.num_added}",
            prompt,
            arrival_s=now_s,
            tenant=tenant,
            cache_salt=salt,
            priority=priority,
            prompt_logprobs=flags == 7,
            reads_prefix_cache=flags != 6,
            deadline_s=None if patience is None or flags & 1 else now_s + patience,
            queue_ttl_s=None if patience is None or not flags & 1 else float(patience),
            ttft_target_s=None if patience is None else float(patience),
            tpot_target_s=None if patience is None else patience / 2000,
        )
        self.num_added += 1
        max_tokens = min(max_tokens, self.most - len(prompt))
        self.driver.add(RequestState(request=one, max_tokens=max_tokens, stop_ids=()))
        self.scheduler.check()

    @precondition(lambda self: len(self.driver.unread) < 2)
    @rule()
    def dispatch(self) -> None:
        self._dispatch()

    @precondition(lambda self: self.driver.unread)
    @rule(stops=st.sampled_from([False, False, False, True]))
    def read(self, stops: bool) -> None:
        """A step is read; `stops`: the first token that it brings ends its request."""
        self._read(stops)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        """As the engine does: each step is dispatched before the one before it is read."""
        for _ in range(count):
            self._dispatch()
            if len(self.driver.unread) > 1:
                self._read(False)

    @precondition(lambda self: self.scheduler.live)
    @rule(which=st.integers(0, 20), is_broken=st.booleans())
    def abort(self, which: int, is_broken: bool) -> None:
        """`is_broken`: nothing that it ever held stays in the cache that nobody needs."""
        self.count("abort")
        live = list(self.scheduler.live.values())
        state = live[which % len(live)]
        self.scheduler.remove(state, float(self.driver.num_steps), is_broken=is_broken)
        self.scheduler.check()
        for node in self.held.pop(state, ()) if is_broken else ():
            assert not node.is_cached or node.holders or node.children, "broken, and not forgotten"

    @rule(later=st.integers(1, 8))
    def wait(self, later: int) -> None:
        self.count("wait")
        self.driver.num_steps += later

    @override
    def teardown(self) -> None:
        if hasattr(self, "driver"):
            try:
                self._end()
            finally:
                self.patch.stop()

    def _end(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.scheduler.live:
                break
            self._dispatch()
            if self.driver.unread:
                self._read(False)
        assert not self.scheduler.live, "somebody waits for ever"
        memory = self.scheduler.memory
        assert memory.num_available == memory.pool.num_usable, "a page leaked"
        assert not len(self.scheduler.waiting)

    def _dispatch(self) -> None:
        if len(self.driver.unread) >= 2:
            self._read(False)
        self.count("dispatch")
        now_s = float(self.driver.num_steps)
        while expired := self.scheduler.expired(now_s):
            assert len(set(map(id, expired))) == len(expired), "a request ends twice"
            for state in expired:
                self.scheduler.remove(state, now_s)
        self._follow(self.driver.dispatch())
        self._note_held()

    def _read(self, stops: bool) -> None:
        self.count("read")
        left = [True] if stops else []
        self.scheduler.observe(self.driver.unread[0], self.step_s)
        self.driver.read(lambda state: bool(left) and left.pop())
        self._note_held()

    def _note_held(self) -> None:
        for state in self.scheduler.running:
            self.held.setdefault(state, set()).update(state.held)

    def _follow(self, schedule: Schedule) -> None:
        """The device's view: page tables, and which pages the step writes."""
        size = self.driver.config.page_size
        for slot, column, page in schedule.page_entries:
            table = self.tables.setdefault(slot, [])
            if column == 0:
                table.clear()
            assert column == len(table), "a column is skipped or set twice"
            table.append(page)
        writers: dict[int, RequestState] = {}
        spans = [(state, state.num_computed_tokens - 1, 1) for state in schedule.decodes]
        spans += [(chunk.state, chunk.start, chunk.length) for chunk in schedule.chunks]
        for state, start, length in spans:
            assert state.slot is not None
            if self.driver.config.deterministic:
                assert self.num_computed.setdefault(state, start) == start, "computed again"
                self.num_computed[state] = start + length
            table = self.tables[state.slot]
            assert table[: -(-(start + length) // size)] == state.page_ids[: len(table)]
            for column in range(start // size, -(-(start + length) // size)):
                assert table[column] not in writers, "two requests write to a page"
                writers[table[column]] = state
        cached = {node.page for node in self.scheduler.memory.cache}
        assert not cached & set(writers), "a step writes to a page that others may read"

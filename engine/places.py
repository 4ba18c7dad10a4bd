"""Places: where each live request is, what it holds there, and the moves in between. No JAX.

Queue, slots, pages and deadlines change together here, so that nothing is lost on the way from one
place to another. Who moves, and when, is for engine.scheduler to say.
"""

from bisect import insort
from collections import Counter
from operator import attrgetter

from ..configs.engine_config import EngineConfig
from .cache_hits import Hit
from .deadlines import Deadlines
from .events import DetailValue, Event, EventKind
from .kv_memory import KVMemory
from .policy import make_queue
from .predictions import Predictions
from .rule_entries import rule_entries
from .schedule import RequestState
from .step_costs import StepCosts
from .swapping import Swapping
from .token_chain import TokenChain, root_key

MAX_UNTRIED = 16
"""After so many requests in a row that could not make it an idle engine begins one all the same, or
no step would ever show that predictions are too long."""


class Places:
    """A live request is in exactly one of three places: waiting, running, ending.

    In none is one that `expired` has named and that was not removed yet.

    Attributes:
      waiting: Has no slot and no pages. A preempted request waits here too; while steps of it are
        unread (`is_unread`) it cannot be admitted, and nobody passes it. In a deterministic engine
        its KV is kept in host memory.
      running: Has a slot, and the pages of its computed tokens and of its prompt. By rank.
      ending: All its tokens were dispatched; it has given back its slot, and ends when the last
        token is read. Until then it keeps pages that it may still publish, if nobody needs them.
      preempted: Who lost a slot since the last step was begun, be there a step in the end or not.
      memory: The pages.
      preemptions_total: Times that one lost its slot.
      prompt_tokens_total: Prompt tokens of those that got a slot, when they first did.
      cached_tokens_total: Those of them that were in the cache then.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_pages: int,
        costs: StepCosts,
        *,
        max_host_pages: int = 0,
        keeps_events: bool = True,
    ) -> None:
        """Starts empty.

        Args:
          config: Sizes, policy and bounds.
          num_pages: Of the KV pool, page 0 included.
          costs: What steps are predicted to take, until steps were measured.
          max_host_pages: Pages that host memory takes.
          keeps_events: Whether schedules carry events.
        """
        scheduling = config.scheduling
        self._predictions = Predictions(config, costs)
        self.waiting = make_queue(config, self._predictions)
        self.running: list[RequestState] = []
        self.ending: list[RequestState] = []
        self.preempted: list[RequestState] = []
        self.memory = KVMemory(
            num_pages,
            config.page_size,
            max_host_pages=max_host_pages,
            costs=self._predictions,
            keeps_events=keeps_events,
            grid_tokens=config.prefill_chunk_tokens if config.deterministic else None,
        )
        self._swapping = Swapping(self.memory, max_host_pages) if config.deterministic else None
        self.preemptions_total = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self._config = config
        self._keeps_events = keeps_events
        bound = scheduling.max_tenant_running
        # A tenant that may have all slots is never passed over: one of its requests may displace
        # another.
        has_bound = bound is not None and bound < config.max_num_seqs
        self._max_tenant_running = bound if has_bound else config.max_num_seqs + 1
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._live: dict[str, RequestState] = {}
        self._num_added = 0
        self._num_prefilling = 0
        self._tenant_running: Counter[str] = Counter()
        self._all_dispatched: list[RequestState] = []  # of these no step is left to make
        self._leaving: set[RequestState] = set()  # waited until `expired` named them
        self._num_untried = 0  # in a row; see MAX_UNTRIED
        self._deadlines = Deadlines(scheduling.queue_ttl_s, self._live)

    @property
    def live(self) -> dict[str, RequestState]:
        """Requests that were added and have not ended, by id, in order. Not to be changed."""
        return self._live

    def add(self, state: RequestState) -> None:
        """Queues a request and gives it its ordinal.

        Raises:
          ValueError: its id is live, or the pool could never hold it.
        """
        request = state.request
        if request.request_id in self._live:
            raise ValueError(
                f"request_id is {request.request_id!r}; it must not be that of a live request"
            )
        needed, num_usable = self.memory.pages(state.max_kv_tokens), self.memory.pool.num_usable
        if needed > num_usable:
            raise ValueError(
                f"request {request.request_id!r} grows to {needed} pages; the pool has {num_usable}"
            )
        state.ordinal = self._num_added
        self._num_added += 1
        self._live[request.request_id] = state
        self._deadlines.add(state)
        if self._config.scheduling.prefix_cache or request.sampling.n > 1:
            root = root_key(
                tenant=request.tenant, salt=request.cache_salt, family=self._family(state)
            )
            state.chain = TokenChain(root, self._config.page_size, request.prompt_token_ids)
        self._wait(state)

    def _family(self, state: RequestState) -> int:
        """Choices of a request that reads no cache share its pages all the same, with nobody else.

        That is the number that parts their chain from all others; 0: it is parted from none.
        """
        leader = state.leader or state
        request = leader.request
        reads_cache = self._config.scheduling.prefix_cache and request.reads_prefix_cache
        return 0 if reads_cache or request.sampling.n == 1 else leader.ordinal + 1

    def remove(self, state: RequestState, now_s: float, *, is_broken: bool = False) -> None:
        """Ends a live request: it gives back all it holds, steps in flight or not.

        What it published is forgotten if it `is_broken`: its logits were not finite.
        """
        del self._live[state.request.request_id]
        state.generation += 1
        self._deadlines.forget()
        if state.slot is not None:
            self._stop(state, now_s)
        elif state in self.ending:
            self.ending.remove(state)
            self.memory.release(state, now_s)
        elif state in self._leaving:
            self._leaving.remove(state)
        else:
            self.waiting.remove(state)
        if is_broken:
            self.memory.forget(state, now_s)
        self.waiting.depart(state)
        if self._swapping is not None:
            self._swapping.leave(state)

    def expired(self, now_s: float) -> list[RequestState]:
        """Live requests whose time is over, or that cannot end in time; the caller removes them.

        Over is a deadline that has passed, or the time that a request may wait for its first slot.
        Who is next in the queue cannot make it if not even its prompt would be done in time: it is
        not begun, and neither is the one behind it for which the same holds.
        """
        states = dict.fromkeys(self._deadlines.expired(now_s))
        while (first := self.waiting.first(now_s)) is not None:
            if first not in states:
                if not self._cannot_make_it(first, now_s):
                    break
                self._num_untried += 1
            self.waiting.remove(first)
            self._leaving.add(first)
            states[first] = None
        return list(states)

    def _cannot_make_it(self, state: RequestState, now_s: float) -> bool:
        """It would have no token by its deadline even if it got a slot at once."""
        deadline_s, end = state.request.deadline_s, state.prefill_end
        if deadline_s is None or state.num_preemptions:
            return False
        if self._num_untried >= MAX_UNTRIED and not self.running:
            return False
        if now_s + self._predictions.prefill_s(end - state.num_uncached_tokens, end) <= deadline_s:
            return False
        # More may be cached than when it began to wait.
        num_cached = self.memory.lookup(state, end).num_pages * self._config.page_size
        return now_s + self._predictions.prefill_s(num_cached, end) > deadline_s

    def _wait(self, state: RequestState) -> None:
        """Enters a request that has no slot into the queue."""
        state.prefill_end = len(state.request.prompt_token_ids) + len(state.output_token_ids)
        hit = self.memory.lookup(state, state.prefill_end)
        cached = hit.num_pages * self._config.page_size
        state.num_uncached_tokens = state.prefill_end - max(cached, state.num_computed_tokens)
        self.waiting.push(state)

    def _start(self, state: RequestState, hit: Hit, now_s: float) -> None:
        """Gives a request a slot and the pages of its prompt, or those that it had."""
        miss = self.memory.explain(state, hit) if self._keeps_events else None
        num_imported = len(hit.on_host) + len(state.copies)
        if self._swapping is not None and state in self._swapping.swapped:
            self._swapping.swap_in(state, now_s)
            cached_tokens, miss = 0, None  # it did not ask the cache
        else:
            self.memory.take(state, hit, state.prefill_end, now_s)
            if self._swapping is not None:
                self._swapping.admit(state)
            cached_tokens = state.num_computed_tokens
        state.slot = self._free_slots.pop()
        state.generation += 1
        state.rule_entries = rule_entries(state)
        state.is_inserted = False
        if state.admitted_s is None:
            state.admitted_s = now_s
            state.rank = self.waiting.rank(state)
            state.num_cached_tokens = cached_tokens
            self.cached_tokens_total += cached_tokens
            self.prompt_tokens_total += len(state.request.prompt_token_ids)
        insort(self.running, state, key=attrgetter("rank"))
        self._num_untried = 0
        self._num_prefilling += 1
        tenant = state.request.tenant
        self._tenant_running[tenant] += 1
        if self._tenant_running[tenant] >= self._max_tenant_running:
            self.waiting.block(tenant)
        if hit.decision is not None:
            self._record(EventKind.DECIDED, state, now_s, **hit.decision)
        reason = {} if miss is None else {"miss": miss[0].value, "miss_at_token": miss[1]}
        self._record(
            EventKind.ADMITTED,
            state,
            now_s,
            slot=state.slot,
            cached_tokens=cached_tokens,
            imported_pages=num_imported,
            **reason,
        )

    def _preempt(self, state: RequestState, now_s: float, *, why: str, by: RequestState) -> None:
        """Takes slot and pages from a running request, which will start over from its tokens.

        In a deterministic engine it will go on where it was.
        """
        self._record(
            EventKind.PREEMPTED,
            state,
            now_s,
            why=why,
            by=by.request.request_id,
            computed_tokens=state.num_computed_tokens,
        )
        if self._swapping is None:
            self._stop(state, now_s)
            state.num_charged_tokens = max(state.num_charged_tokens, state.num_computed_tokens)
            state.num_computed_tokens = state.num_committed_tokens = 0
        else:
            self._leave_slot(state)
            self._swapping.swap_out(state, now_s)
        state.num_preemptions += 1
        self.preemptions_total += 1
        self.preempted.append(state)
        self._wait(state)

    def _stop(self, state: RequestState, now_s: float) -> None:
        """Takes slot and pages from a running request."""
        self._leave_slot(state)
        self.memory.release(state, now_s)

    def _leave_slot(self, state: RequestState) -> None:
        assert state.slot is not None
        self.running.remove(state)
        self._num_prefilling -= state.is_prefilling
        self._free_slots.append(state.slot)
        state.slot = None
        state.num_entered_pages = 0
        tenant = state.request.tenant
        self._tenant_running[tenant] -= 1
        if self._tenant_running[tenant] == self._max_tenant_running - 1:
            self.waiting.unblock(tenant)
        if not self._tenant_running[tenant]:
            del self._tenant_running[tenant]

    def _release_ending(self, now_s: float) -> None:
        """Takes the slot from requests that need no further step, and pages that are of no use.

        Their last steps are not read yet, and with these a page may become full and be published;
        it is all that a request of one token leaves behind.
        """
        for state in self._all_dispatched:
            if state.slot is not None:  # else it has ended, or was preempted and starts over
                self._leave_slot(state)
                num_full = self.memory.num_publishable(state, state.num_computed_tokens)
                if state.chain is None or num_full == len(state.held):
                    self.memory.release(state, now_s)
                self.ending.append(state)
                if self._swapping is not None:
                    self._swapping.leave(state)
        self._all_dispatched.clear()

    def _has_slot_for(self, state: RequestState) -> bool:
        """Its tenant may have one more."""
        return self._tenant_running[state.request.tenant] < self._max_tenant_running

    def _reclaim(self, now_s: float) -> bool:
        """Takes the pages of requests that need no further step; False: there are none."""
        keepers = [state for state in self.ending if state.page_ids]
        for state in keepers:
            self.memory.release(state, now_s)
        return bool(keepers)

    def _record(
        self, kind: EventKind, state: RequestState, now_s: float, **detail: DetailValue
    ) -> None:
        if self._keeps_events:
            self.memory.events.append(Event(now_s, kind, state.request.request_id, dict(detail)))

    def check(self) -> None:
        """Asserts what must hold between any two calls. Tests call it after every step."""
        waiting = list(self.waiting)
        places = [*waiting, *self.running, *self.ending, *self._leaving]
        assert len(places) == len(self._live), "a live request is in no place, or in two"
        assert {id(state) for state in places} == {id(state) for state in self._live.values()}
        assert len(waiting) == len(self.waiting)
        ranks = [state.rank for state in self.running]
        assert ranks == sorted(ranks), "those that run are out of order"

        slots = [state.slot for state in self.running]
        assert sorted([*self._free_slots, *(slot for slot in slots if slot is not None)]) == list(
            range(self._config.max_num_seqs)
        ), "a slot is lost, or held twice"
        running = Counter(state.request.tenant for state in self.running)
        assert running == self._tenant_running
        assert max(running.values(), default=0) <= self._max_tenant_running
        assert self._num_prefilling == sum(state.is_prefilling for state in self.running)

        swapped = [] if self._swapping is None else self._swapping.swapped
        self.memory.check([*self.running, *self.ending], swapped)
        if self._swapping is not None:
            self._swapping.check(self.running, [*waiting, *self._leaving])
        for state in self.running:
            computed = max(state.num_computed_tokens, state.prefill_end)
            assert len(state.page_ids) == self.memory.pages(computed)
            assert state.num_computed_tokens <= state.max_kv_tokens
            assert state.num_committed_tokens <= state.num_computed_tokens
            assert len(state.held) <= state.num_committed_tokens // self._config.page_size
            assert state.num_entered_pages <= len(state.page_ids)
        for state in (*waiting, *self.ending):
            assert state.slot is None, "a request holds a slot that it does not need"
        for state in waiting:
            assert not state.page_ids, "a request holds pages that it does not need"
            assert not state.held, "a request holds cached pages that it does not need"
        self._deadlines.check()
        for state in self._live.values():
            assert 0 <= state.in_flight <= 2, "more steps are in flight than are dispatched ahead"
            assert len(state.output_token_ids) <= state.num_sampled <= state.max_tokens
            assert state in swapped or not state.copies, "a copy of one that has its pages"

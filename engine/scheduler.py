"""Scheduler: which requests run in the next step, and with which pages.

Owns waiting and running requests, slots and the pages; a function of its inputs, the clock
included. No JAX.

Who gets the next slot is the policy's to say (engine.policy). Among those that run one order rules,
their rank: the lowest rank gets its pages first, and the highest loses them, so the lowest always
advances and everyone who runs ends.

Steps run on the device in the order in which they are dispatched. That is why slots and pages
may change hands while steps that use them are still in flight: whatever a later step writes there
comes after.
"""

import heapq
import math
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ..configs.engine_config import EngineConfig
from .chunk_budget import ChunkBudget
from .events import DetailValue, Event, EventKind
from .kv_memory import Hit, KVMemory
from .policy import make_queue
from .schedule import PageEntry, PrefillChunk, RequestState, Schedule
from .step_costs import StepCosts
from .step_shapes import HIT_PAGE_ENTRIES, MAX_SEGMENTS
from .token_chain import TokenChain, root_key

MAX_STALE_DEADLINES = 64  # beyond four for each live request

LONG_PROMPT_CHUNKS = 4
"""A prompt with more chunks than this to go leaves half of each step's tokens to those behind it,
so that short prompts need not wait until a long one is through."""

KEPT_FOR_LOWEST = 8
"""One prompt token in so many is kept for the lowest rank, whoever is more urgent."""

MAX_DOUBLINGS = 20
_NEVER = 1 << 62


@dataclass
class _Step:
    """A Schedule while it is made.

    Attributes:
      budget: Prompt tokens that it still has room for.
      max_segments: Most requests whose prompts it may continue.
      hit_entries: Page-table entries of cached pages that it still has room for.
      grants: Prompt tokens of each request that prefills, in order.
    """

    budget: int = 0
    max_segments: int = MAX_SEGMENTS
    hit_entries: int = HIT_PAGE_ENTRIES
    decodes: list[RequestState] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    decode_kv_tokens: int = 0
    grants: dict[RequestState, int] = field(default_factory=dict)
    page_entries: list[PageEntry] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)

    @property
    def takes_chunks(self) -> bool:
        """There is room for one more prompt chunk."""
        return self.budget > 0 and len(self.grants) < self.max_segments


class Scheduler:
    """Decode rows first, then prompts under way, then admissions; preemption when pages run out.

    A live request is in exactly one of three places:

    Attributes:
      waiting: Has no slot and no pages. A preempted request waits here too; while tokens of it are
        unread (`in_flight`) it cannot be admitted, and nobody passes it.
      running: Has a slot, and the pages of its computed tokens and of its prompt. By rank.
      ending: All its tokens were dispatched; it has given back its slot, and ends when the last
        token is read. Until then it keeps pages that it may still publish, if nobody needs them.
      memory: The pages.
      queued_tokens: Tokens that waiting requests must compute for their prompts.
      preemptions_total: Times that a request lost its slot.
      prompt_tokens_total: Prompt tokens of requests that got a slot, each counted once.
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
          costs: What steps are predicted to take.
          max_host_pages: Pages that host memory takes.
          keeps_events: Whether schedules carry events.
        """
        scheduling = config.scheduling
        self.waiting = make_queue(scheduling, config.max_num_seqs, costs)
        self.running: list[RequestState] = []
        self.ending: list[RequestState] = []
        self.memory = KVMemory(
            num_pages,
            config.page_size,
            max_host_pages=max_host_pages,
            costs=costs,
            keeps_events=keeps_events,
        )
        self.queued_tokens = 0
        self.preemptions_total = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self._config = config
        self._costs = costs
        self._keeps_events = keeps_events
        self._budget = ChunkBudget(config, costs)
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
        self._preempted: list[RequestState] = []  # since it was last asked
        # Time, ordinal, id, and whether it is only about waiting. Requests that have ended stay
        # named until their time comes, or until they are more than those that live.
        self._deadlines: list[tuple[float, int, str, bool]] = []

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
        for at_s, is_wait in self._deadlines_of(state):
            heapq.heappush(self._deadlines, (at_s, state.ordinal, request.request_id, is_wait))
        if self._config.scheduling.prefix_cache:
            root = root_key(tenant=request.tenant, salt=request.cache_salt)
            state.chain = TokenChain(root, self._config.page_size, request.prompt_token_ids)
        self._wait(state)

    def remove(self, state: RequestState, now_s: float) -> None:
        """Ends a live request: it gives back all it holds, steps in flight or not."""
        del self._live[state.request.request_id]
        state.generation += 1
        self._forget_deadlines()
        if state.slot is not None:
            self._stop(state, now_s)
        elif state in self.ending:
            self.ending.remove(state)
            self.memory.release(state, now_s)
        else:
            self._wait_no_more(state)
        self.waiting.depart(state)

    def expired(self, now_s: float) -> list[RequestState]:
        """Live requests whose time is over, or that cannot end in time; each is named once.

        Over is a deadline that has passed, or the time that a request may wait for its first slot.
        Who is next in the queue cannot make it if not even its prompt would be done in time: it is
        not begun.
        """
        states: dict[str, RequestState] = {}
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, ordinal, request_id, is_wait = heapq.heappop(self._deadlines)
            state = self._live.get(request_id)
            if state is None or state.ordinal != ordinal:
                continue
            if not is_wait or state.admitted_s is None:
                states[request_id] = state
        first = self.waiting.first(now_s)
        if first is not None and self._cannot_make_it(first, now_s):
            states[first.request.request_id] = first
        return list(states.values())

    def schedule(self, now_s: float) -> Schedule | None:
        """Decides the next step and counts it as dispatched.

        None: there is nothing to dispatch, which happens only when no request is live or all of
        them are in flight. Reading the step in flight then helps; waiting never does.
        """
        step = _Step()
        self._release_ending(now_s)
        self._displace(step, now_s)
        self._run_decodes(step, now_s)
        num_decodes = len(step.decodes)
        step.budget = self._budget.tokens(
            self.running, num_decodes=num_decodes, decode_kv_tokens=step.decode_kv_tokens
        )
        if self._num_prefilling:
            self._continue_prompts(step, now_s)
        if self.waiting:
            self._admit(step, now_s)
        chunks = self._make_chunks(step) if step.grants else []
        if not (num_decodes or chunks or step.page_entries):
            return None
        memory = self.memory
        schedule = Schedule(
            decodes=tuple(step.decodes),
            generations=tuple(step.generations),
            chunks=tuple(chunks),
            page_entries=tuple(step.page_entries),
            preempted=tuple(step.preempted),
            transfers=tuple(memory.transfers),
            events=tuple(memory.events),
            decode_kv_tokens=step.decode_kv_tokens,
        )
        memory.transfers.clear()
        memory.events.clear()
        return schedule

    def take_preempted(self) -> list[RequestState]:
        """Requests that lost their slot since the last call; a step that did so may be none."""
        preempted = self._preempted.copy()
        self._preempted.clear()
        return preempted

    def take_token(self, state: RequestState, token_id: int) -> None:
        """A step was read that fed a request's last token and sampled this one.

        Only for requests that are live in the generation that the step was made for.
        """
        state.output_token_ids.append(token_id)
        if state.page_ids:
            state.num_committed_tokens += 1
            if state.num_committed_tokens == state.publish_at:
                self._publish(state)

    def take_chunk(self, chunk: PrefillChunk, token_id: int | None) -> None:
        """A step was read that computed a chunk; the last one of a prompt samples a token."""
        state = chunk.state
        if state.page_ids:
            state.num_committed_tokens = chunk.start + chunk.length
            if state.num_committed_tokens >= state.publish_at:
                self._publish(state)
        if token_id is not None:
            state.output_token_ids.append(token_id)

    def num_steady_rounds(self, unread: Schedule, now_s: float, most: int) -> int:
        """How many rounds, at most `most`, are certain to do nothing but decode the same rows.

        A round schedules a step and then reads the one before it; `unread` is that in flight. No
        round is certain from the next deadline on (`next_deadline_s`), nor once a token stops a
        request, which only the caller can know.
        """
        running = self.running
        if unread.chunks or len(unread.decodes) != len(running) or not running:
            return 0
        if self._num_prefilling or self._all_dispatched or self.ending:
            return 0
        if self.waiting and not self._nobody_can_start(now_s):
            return 0
        for row, generation, state in zip(unread.decodes, unread.generations, running, strict=True):
            if row is not state or generation != state.generation:
                return 0
            most = min(most, state.max_tokens - state.num_sampled)
        while most > 0 and not self._pages_suffice(most):
            most //= 2
        return most

    @property
    def next_deadline_s(self) -> float:
        """Before this time nobody's time is over."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def advance_decodes(self, times_s: Sequence[float], token_id: int) -> None:
        """Does steady rounds (num_steady_rounds) at once, with the same effect as one by one.

        The transfers and events of their schedules go into the next one; their page entries go
        nowhere, so this is for devices that are simulated.

        Args:
          times_s: When each round's step is scheduled.
          token_id: What each row samples in each of the steps that are read.
        """
        count, size = len(times_s), self._config.page_size
        happenings: list[tuple[int, bool, int]] = []  # round, whether a page is published, row
        for row, state in enumerate(self.running):
            grows_in = len(state.page_ids) * size - state.num_computed_tokens
            happenings += [(at, False, row) for at in range(grows_in, count, size)]
            published_in = state.publish_at - state.num_committed_tokens - 1
            happenings += [(at, True, row) for at in range(published_in, count, size)]
            state.output_token_ids += [token_id] * count
        happenings.sort()
        committed = [state.num_committed_tokens for state in self.running]
        for at, is_publish, row in happenings:
            state = self.running[row]
            if not is_publish:
                self.memory.grow(state, times_s[at])
                state.num_entered_pages += 1
            elif state.chain is not None:
                state.num_committed_tokens = committed[row] + at + 1
                self._publish(state)
        for row, state in enumerate(self.running):
            state.num_committed_tokens = committed[row] + count
            state.num_computed_tokens += count
            state.num_sampled += count
            if state.num_sampled == state.max_tokens:
                self._all_dispatched.append(state)
            self.waiting.charge(state, count)

    def observe(self, schedule: Schedule, measured_s: float) -> None:
        """Tells how long a step took, from which later chunks are sized."""
        self._budget.observe(schedule, measured_s)

    def _nobody_can_start(self, now_s: float) -> bool:
        """Nobody who waits can get a slot, or ends, as long as those that run go on."""
        if self._free_slots or self._deadlines:
            return False
        first = self.waiting.first(now_s)
        return first is None or not self.waiting.may_displace(first, self.running[-1])

    def _pages_suffice(self, num_rounds: int) -> bool:
        """There are pages for so many tokens more of each row.

        A page that is published may turn out to be cached already: the copy that nobody held is
        held then. So each new page counts twice.
        """
        needed = len(self.running)
        for state in self.running:
            pages = self.memory.pages(state.num_computed_tokens + num_rounds)
            needed += 2 * (pages - len(state.page_ids))
        return needed <= self.memory.num_available

    def _publish(self, state: RequestState) -> None:
        self.memory.publish(state)
        self._set_publish_at(state)

    def _set_publish_at(self, state: RequestState) -> None:
        size = self._config.page_size
        is_cached = state.chain is not None
        state.publish_at = (state.num_committed_tokens // size + 1) * size if is_cached else _NEVER

    def _deadlines_of(self, state: RequestState) -> list[tuple[float, bool]]:
        """When a request's time is over, and whether only its waiting is."""
        request = state.request
        found: list[tuple[float, bool]] = []
        if request.deadline_s is not None:
            found.append((request.deadline_s, False))
        ttls = (request.queue_ttl_s, self._config.scheduling.queue_ttl_s)
        ttl_s = min((ttl for ttl in ttls if ttl is not None), default=None)
        if ttl_s is not None and state.admitted_s is None:
            found.append((request.arrival_s + ttl_s, True))
        return found

    def _forget_deadlines(self) -> None:
        """Drops those of ended requests, once they are the most: deadlines may be days away."""
        if len(self._deadlines) > 4 * len(self._live) + MAX_STALE_DEADLINES:
            self._deadlines = [
                (at_s, state.ordinal, request_id, is_wait)
                for request_id, state in self._live.items()
                for at_s, is_wait in self._deadlines_of(state)
            ]
            heapq.heapify(self._deadlines)

    def _cannot_make_it(self, state: RequestState, now_s: float) -> bool:
        deadline_s, end = state.request.deadline_s, state.prefill_end
        if deadline_s is None or state.num_preemptions:
            return False
        if now_s + self._costs.prefill_s(end - state.num_uncached_tokens, end) <= deadline_s:
            return False
        # More may be cached than when it began to wait.
        num_cached = self.memory.lookup(state, end).num_pages * self._config.page_size
        return now_s + self._costs.prefill_s(num_cached, end) > deadline_s

    def _wait(self, state: RequestState) -> None:
        """Enters a request that has no slot into the queue."""
        state.prefill_end = len(state.request.prompt_token_ids) + len(state.output_token_ids)
        hit = self.memory.lookup(state, state.prefill_end)
        cached = hit.num_pages * self._config.page_size
        state.num_uncached_tokens = state.prefill_end - cached
        self.queued_tokens += state.num_uncached_tokens
        self.waiting.push(state)

    def _wait_no_more(self, state: RequestState) -> None:
        self.waiting.remove(state)
        self.queued_tokens -= state.num_uncached_tokens

    def _release_ending(self, now_s: float) -> None:
        """Takes the slot from requests that need no further step, and pages that are of no use.

        Their last steps are not read yet, and with these a page may become full and be published;
        it is all that a request of one token leaves behind.
        """
        for state in self._all_dispatched:
            if state.slot is not None:  # else it has ended, or was preempted and starts over
                self._leave_slot(state)
                num_full = state.num_computed_tokens // self._config.page_size
                if state.chain is None or num_full == len(state.held):
                    self.memory.release(state, now_s)
                self.ending.append(state)
        self._all_dispatched.clear()

    def _reclaim(self, now_s: float) -> bool:
        """Takes the pages of requests that need no further step; False: there are none."""
        keepers = [state for state in self.ending if state.page_ids]
        for state in keepers:
            self.memory.release(state, now_s)
        return bool(keepers)

    def _displace(self, step: _Step, now_s: float) -> None:
        """Makes room for a waiting request that may take it from running ones; not often.

        Before the step is made, so that nobody is preempted who is part of it.
        """
        state = self._next(now_s) if self.running else None
        if state is None:
            return
        if not self._could_fit(state):
            return
        while self.running and self.waiting.may_displace(state, self.running[-1]):
            if self._free_slots:
                if self._fits(state, self.memory.lookup(state, state.prefill_end)):
                    return
                if self._reclaim(now_s):
                    continue
            self._preempt(step, self.running[-1], now_s, why="displaced", by=state)

    def _could_fit(self, state: RequestState) -> bool:
        """Whether there might be pages for a waiting request if all gave way that it may displace.

        Those who run ahead of it may hold too many; then nobody need give way for nothing.
        """
        hit = self.memory.lookup(state, state.prefill_end)
        needed = self.memory.num_needed(hit, min(state.prefill_end + 1, state.max_kv_tokens))
        room = self.memory.num_available + sum(len(each.page_ids) for each in self.ending)
        for other in reversed(self.running):
            if room >= needed or not self.waiting.may_displace(state, other):
                break
            room += len(other.page_ids)
        return room >= needed

    def _run_decodes(self, step: _Step, now_s: float) -> None:
        """Gives every running request that is past its prompt a decode row.

        In order of rank, so that whoever is preempted is not part of the step yet.
        """
        page_size = self._config.page_size
        decodes, generations = step.decodes, step.generations
        kv_tokens, at = 0, 0
        while at < len(self.running):
            state = self.running[at]
            at += 1
            computed = state.num_computed_tokens
            if computed < state.prefill_end:
                continue
            if computed == len(state.page_ids) * page_size:
                if not self._make_room(step, state, now_s):
                    continue
                self.memory.grow(state, now_s)
                self._enter_pages(step, state)
            state.num_computed_tokens = computed + 1
            state.num_sampled += 1
            if state.num_sampled == state.max_tokens:
                self._all_dispatched.append(state)
            kv_tokens += computed + 1
            decodes.append(state)
            generations.append(state.generation)
        step.decode_kv_tokens = kv_tokens
        if self.waiting.keeps_count:
            for state in decodes:
                self.waiting.charge(state, 1)

    def _make_room(self, step: _Step, state: RequestState, now_s: float) -> bool:
        """Preempts the highest rank until there is a page. False: that was `state` itself."""
        while not self.memory.num_available:
            if self._reclaim(now_s):
                continue
            victim = self.running[-1]
            self._preempt(step, victim, now_s, why="pages", by=state)
            if victim is state:
                return False
        return True

    def _continue_prompts(self, step: _Step, now_s: float) -> None:
        """Shares out the step's prompt tokens, the most urgent first, be it under way or new.

        Of those under way the lowest rank gets a part of them in any case, so it always advances.
        """
        prompts = [state for state in self.running if state.is_prefilling]
        kept = -(-step.budget // KEPT_FOR_LOWEST)
        step.budget -= kept
        step.max_segments -= 1
        for state in sorted(prompts, key=self.waiting.urgency):
            if self.waiting:
                self._admit(step, now_s, before=state)
            if state is prompts[0]:
                step.budget += kept
                step.max_segments += 1
            if step.takes_chunks:
                self._grant(step, state)

    def _grant(self, step: _Step, state: RequestState) -> None:
        """Gives a request that prefills its share of the step's prompt tokens."""
        rest = state.prefill_end - state.num_computed_tokens
        share = step.budget
        if rest > LONG_PROMPT_CHUNKS * self._config.prefill_chunk_tokens:
            share = -(-share // 2)
        step.grants[state] = min(rest, share)
        step.budget -= min(rest, share)

    def _admit(self, step: _Step, now_s: float, before: RequestState | None = None) -> None:
        """Gives slots to waiting requests, in the policy's order, as long as their prompts fit.

        With `before` only to those whose prompts are more urgent than that one's, which runs.

        Nobody comes back in the step that preempted them: what their pages leave, once the one
        who needed them is served, is less than what they held.
        """
        while self._free_slots and step.takes_chunks:
            state = self._next(now_s)
            if state is None or state in step.preempted:
                return
            urgency = self.waiting.urgency
            if before is not None and urgency(before) < urgency(state):
                return
            if not self.waiting.may_start(state, len(self._free_slots)):
                return
            hit = self.memory.lookup(state, state.prefill_end)
            if not self._fits(state, hit):
                if self._reclaim(now_s):
                    continue
                return
            self._wait_no_more(state)
            self._start(state, hit, now_s)
            self._grant(step, state)

    def _next(self, now_s: float) -> RequestState | None:
        """Who gets a slot next; None while tokens of that one are unread: nobody passes it."""
        state = self.waiting.first(now_s)
        if state is None or state.in_flight:
            return None
        state.prefill_end = len(state.request.prompt_token_ids) + len(state.output_token_ids)
        return state

    def _fits(self, state: RequestState, hit: Hit) -> bool:
        """There are pages for its prompt and its first token, and for all others to grow.

        All need room to grow, or the newcomer would be preempted as soon as it is admitted. One
        that was preempted before needs twice the room each time, so it cannot come back often to
        lose what it computed.
        """
        growth = self._config.page_size << min(state.num_preemptions, MAX_DOUBLINGS)
        soon = state.prefill_end + (growth if state.num_preemptions else 1)
        needed = self.memory.num_needed(hit, min(soon, state.max_kv_tokens))
        room = self.memory.num_available - needed
        for other in self.running:
            if room < 0:
                break
            computed = max(other.num_computed_tokens, other.prefill_end)
            soon = min(computed + growth, other.max_kv_tokens)
            room -= self.memory.pages(soon) - len(other.page_ids)
        return room >= 0

    def _start(self, state: RequestState, hit: Hit, now_s: float) -> None:
        """Gives a request a slot and the pages of its prompt."""
        miss = self.memory.explain(state, hit) if self._keeps_events else None
        self.memory.take(state, hit, state.prefill_end, now_s)
        self._set_publish_at(state)
        state.slot = self._free_slots.pop()
        state.generation += 1
        cached_tokens = state.num_computed_tokens
        if state.admitted_s is None:
            state.admitted_s = now_s
            state.rank = self.waiting.rank(state)
            state.num_cached_tokens = cached_tokens
            self.cached_tokens_total += cached_tokens
            self.prompt_tokens_total += len(state.request.prompt_token_ids)
        insort(self.running, state, key=attrgetter("rank"))
        self._num_prefilling += 1
        tenant = state.request.tenant
        self._tenant_running[tenant] += 1
        if self._tenant_running[tenant] >= self._max_tenant_running:
            self.waiting.block(tenant)
        if miss is None:
            return
        if hit.decision is not None:
            self._record(EventKind.DECIDED, state, now_s, **hit.decision)
        self._record(
            EventKind.ADMITTED,
            state,
            now_s,
            slot=state.slot,
            cached_tokens=cached_tokens,
            imported_pages=len(hit.on_host),
            miss=miss[0].value,
            miss_at_token=miss[1],
        )

    def _make_chunks(self, step: _Step) -> list[PrefillChunk]:
        """Turns grants into chunks; what is left of the budget goes to the first."""
        chunks: list[PrefillChunk] = []
        for state, granted in step.grants.items():
            start = state.num_computed_tokens
            if not self._enter_cached_pages(step, state):
                step.budget += granted
                continue
            extra = min(step.budget, state.prefill_end - start - granted)
            step.budget -= extra
            chunks.append(self._make_chunk(step, state, granted + extra))
        return chunks

    def _make_chunk(self, step: _Step, state: RequestState, length: int) -> PrefillChunk:
        start, end = state.num_computed_tokens, state.num_computed_tokens + length
        is_insert = start == state.first_computed
        state.num_computed_tokens = end
        self._enter_pages(step, state, self.memory.pages(end))
        is_last = end == state.prefill_end
        if is_last:
            self._num_prefilling -= 1
            state.num_sampled += 1
            if state.num_sampled == state.max_tokens:
                self._all_dispatched.append(state)
        num_fresh = end - max(start, state.num_charged_tokens)
        if self.waiting.keeps_count and num_fresh > 0:
            self.waiting.charge(state, num_fresh)
        return PrefillChunk(
            state=state,
            start=start,
            length=length,
            is_insert=is_insert,
            is_last=is_last,
            generation=state.generation,
        )

    def _enter_cached_pages(self, step: _Step, state: RequestState) -> bool:
        """Enters the pages that were computed before its first chunk; a long prefix takes steps.

        False: some are left for the next step, and no chunk may read them yet.
        """
        missing = state.num_computed_tokens // self._config.page_size - state.num_entered_pages
        if missing <= 0:
            return True
        entered = min(missing, step.hit_entries)
        step.hit_entries -= entered
        self._enter_pages(step, state, state.num_entered_pages + entered)
        return entered == missing

    def _enter_pages(self, step: _Step, state: RequestState, end: int | None = None) -> None:
        """Enters a request's pages up to `end`, or all, in the device's page table."""
        assert state.slot is not None
        for column in range(state.num_entered_pages, len(state.page_ids) if end is None else end):
            step.page_entries.append(PageEntry(state.slot, column, state.page_ids[column]))
            state.num_entered_pages = column + 1

    def _preempt(
        self, step: _Step, state: RequestState, now_s: float, *, why: str, by: RequestState
    ) -> None:
        """Takes slot and pages from a running request, which will start over from its tokens."""
        self._record(
            EventKind.PREEMPTED,
            state,
            now_s,
            why=why,
            by=by.request.request_id,
            computed_tokens=state.num_computed_tokens,
        )
        self._stop(state, now_s)
        state.num_charged_tokens = max(state.num_charged_tokens, state.num_computed_tokens)
        state.num_computed_tokens = state.num_committed_tokens = 0
        state.num_preemptions += 1
        self.preemptions_total += 1
        step.preempted.append(state)
        self._preempted.append(state)
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

    def _record(
        self, kind: EventKind, state: RequestState, now_s: float, **detail: DetailValue
    ) -> None:
        if self._keeps_events:
            self.memory.events.append(Event(now_s, kind, state.request.request_id, dict(detail)))

    def check(self) -> None:
        """Asserts what must hold between any two calls. Tests call it after every step."""
        waiting = list(self.waiting)
        places = [*waiting, *self.running, *self.ending]
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

        self.memory.check([*self.running, *self.ending])
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
        assert self.queued_tokens == sum(state.num_uncached_tokens for state in waiting)
        assert len(self._deadlines) <= 4 * len(self._live) + MAX_STALE_DEADLINES
        for state in self._live.values():
            assert 0 <= state.in_flight <= 2, "more steps are in flight than are dispatched ahead"
            assert len(state.output_token_ids) <= state.num_sampled <= state.max_tokens

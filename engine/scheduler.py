"""Scheduler: which requests run in the next step, and with which pages.

A function of its inputs, the clock included. No JAX. Where requests are and what they hold is in
engine.places; here it is decided who moves and what each step does.

Who gets the next slot is the policy's to say (engine.policy). Among those that run one order rules,
their rank: the lowest rank gets its pages first, and the highest loses them, so the lowest always
advances and everyone who runs ends.

Steps run on the device in the order in which they are dispatched. That is why slots and pages
may change hands while steps that use them are still in flight: whatever a later step writes there
comes after.
"""

from dataclasses import dataclass, field
from itertools import islice
from typing import override

from ..configs.engine_config import EngineConfig
from .chunk_budget import ChunkBudget
from .kv_memory import Hit
from .places import Places
from .schedule import PageEntry, PrefillChunk, RequestState, RuleEntry, Schedule
from .step_costs import StepCosts
from .step_shapes import HIT_PAGE_ENTRIES, MAX_SEGMENTS, RULE_ENTRIES

LONG_PROMPT_CHUNKS = 4
"""A prompt with more chunks than this to go leaves half of each step's tokens to those behind it,
so that short prompts need not wait until a long one is through."""

KEPT_FOR_LOWEST = 8
"""One prompt token in so many is kept for the lowest rank, whoever is more urgent."""

MAX_DOUBLINGS = 20


@dataclass
class _Step:
    """A Schedule while it is made.

    Attributes:
      budget: Prompt tokens that it still has room for.
      max_segments: Most requests whose prompts it may continue.
      hit_entries: Page-table entries of cached pages that it still has room for.
      num_rule_entries: Entries of the rule tables that it still has room for.
      grants: Prompt tokens of each request that prefills, in order; 0: it goes on with a decode
        row.
      newcomer: For whom others lost their slots; it gets one before all others, be its turn over
        by then (decode rows of this step count too).
    """

    budget: int = 0
    max_segments: int = MAX_SEGMENTS
    hit_entries: int = HIT_PAGE_ENTRIES
    num_rule_entries: int = RULE_ENTRIES
    decodes: list[RequestState] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    decode_kv_tokens: int = 0
    grants: dict[RequestState, int] = field(default_factory=dict)
    newcomer: RequestState | None = None
    inserts: list[RequestState] = field(default_factory=list)
    masked: list[RequestState] = field(default_factory=list)
    page_entries: list[PageEntry] = field(default_factory=list)
    rule_entries: list[RuleEntry] = field(default_factory=list)

    @property
    def takes_chunks(self) -> bool:
        """There is room for one more prompt chunk."""
        return self.budget > 0 and len(self.grants) < self.max_segments


class Scheduler(Places):
    """Decode rows first, then prompts under way, then admissions; preemption when pages run out."""

    @override
    def __init__(
        self,
        config: EngineConfig,
        num_pages: int,
        costs: StepCosts,
        *,
        max_host_pages: int = 0,
        keeps_events: bool = True,
    ) -> None:
        """Starts empty; arguments as in Places."""
        super().__init__(
            config, num_pages, costs, max_host_pages=max_host_pages, keeps_events=keeps_events
        )
        self._budget = ChunkBudget(config, self._predictions)
        self._takes_whole_chunks = config.deterministic

    def schedule(self, now_s: float) -> Schedule | None:
        """Decides the next step and counts it as dispatched; `preempted` says who lost a slot.

        None: there is nothing to dispatch, which happens only when every live request is in flight,
        waits for its mask or cannot make its deadline. Reading the step in flight then helps, or
        `take_mask`, or ending those that have `expired`, which names one more at least.
        """
        step = _Step()
        self.preempted = []
        self._release_ending(now_s)
        self._displace(step, now_s)
        self._run_decodes(step, now_s)
        if self._num_prefilling or (self.waiting and self._free_slots):  # not in most steps
            step.budget = self._budget.tokens(
                self.running, step.decodes, decode_kv_tokens=step.decode_kv_tokens
            )
        if self._num_prefilling:
            self._continue_prompts(step, now_s)
        if self.waiting:
            self._admit(step, now_s)
        chunks = self._make_chunks(step) if step.grants else []
        is_change = step.page_entries or step.rule_entries or step.inserts
        if not (step.decodes or chunks or is_change):
            return None
        memory = self.memory
        schedule = Schedule(
            decodes=tuple(step.decodes),
            generations=tuple(step.generations),
            chunks=tuple(chunks),
            inserts=tuple(step.inserts),
            masked=tuple(step.masked),
            page_entries=tuple(step.page_entries),
            rule_entries=tuple(step.rule_entries),
            transfers=tuple(memory.transfers),
            events=tuple(memory.events),
            decode_kv_tokens=step.decode_kv_tokens,
        )
        memory.transfers.clear()
        memory.events.clear()
        return schedule

    def take_token(self, state: RequestState, token_id: int) -> None:
        """A step was read that fed a request's last token and sampled this one.

        Only for requests that are live in the generation that the step was made for.
        """
        state.output_token_ids.append(token_id)
        if state.page_ids or state.copies:
            state.num_committed_tokens += 1
            if state.num_committed_tokens == state.publish_at:
                self._publish(state)

    def take_chunk(self, chunk: PrefillChunk, token_id: int | None) -> None:
        """A step was read that computed a chunk; the last one of a prompt samples a token."""
        state = chunk.state
        if state.page_ids or state.copies:
            state.num_committed_tokens = chunk.start + chunk.length
            if state.num_committed_tokens >= state.publish_at:
                self._publish(state)
        if token_id is not None:
            state.output_token_ids.append(token_id)

    def take_mask(self, state: RequestState) -> None:
        """It is known which ids may come next in a guided output."""
        state.waits_for_mask = False

    def observe(self, schedule: Schedule, measured_s: float) -> None:
        """Tells how long a step took; what is predicted of later ones follows."""
        self._predictions.observe(schedule, measured_s)

    def _displace(self, step: _Step, now_s: float) -> None:
        """Makes room for a waiting request that may take it from running ones; not often.

        Before the step is made, so that nobody is preempted who is part of it.
        """
        state = self._next(now_s) if self.running else None
        if state is None:
            return
        victims = self.waiting.gives_way(state, self.running)
        if self._reserve is not None:
            victims = self._first_to_swap(victims)
        if not victims or not self._could_fit(state, victims):
            return
        step.newcomer = state
        for victim in victims:
            while self._free_slots:
                if self._fits(state, self.memory.lookup(state, state.prefill_end)):
                    return
                if not self._reclaim(now_s):
                    break
            self._preempt(victim, now_s, why="displaced", by=state)

    def _first_to_swap(self, victims: list[RequestState]) -> list[RequestState]:
        """The first of them, as many as there is room for in host memory."""
        room, taken = self.memory.num_swap_room, 0
        for count, victim in enumerate(victims):
            taken += self.memory.pages(victim.num_computed_tokens)
            if taken > room:
                return victims[:count]
        return victims

    def _could_fit(self, state: RequestState, victims: list[RequestState]) -> bool:
        """Whether there might be pages for a waiting request if all victims gave way.

        Those who run ahead of it may hold too many; then nobody need give way for nothing.
        """
        memory = self.memory
        hit = memory.lookup(state, state.prefill_end)
        needed = memory.num_needed(hit, min(state.prefill_end + 1, state.max_kv_tokens))
        missing = needed - memory.num_available
        return missing <= 0 or memory.num_gained(hit, [*self.ending, *victims]) >= missing

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
            if computed < state.prefill_end or state.waits_for_mask:
                continue
            if computed == len(state.page_ids) * page_size:
                if not self._make_room(state, now_s):
                    continue
                self.memory.grow(state, now_s)
                self._enter_pages(step, state)
            state.num_computed_tokens = computed + 1
            state.num_sampled += 1
            if state.num_sampled == state.max_tokens:
                self._all_dispatched.append(state)
            if state.is_guided:
                state.waits_for_mask = True
                step.masked.append(state)
            kv_tokens += computed + 1
            decodes.append(state)
            generations.append(state.generation)
        step.decode_kv_tokens = kv_tokens
        if self.waiting.keeps_count:
            for state in decodes:
                self.waiting.charge(state, 1)

    def _make_room(self, state: RequestState, now_s: float) -> bool:
        """Preempts the highest rank until there is a page. False: that was `state` itself."""
        while not self.memory.num_available:
            if self._reclaim(now_s):
                continue
            victim = self.running[-1]
            self._preempt(victim, now_s, why="pages", by=state)
            if victim is state:
                return False
        return True

    def _continue_prompts(self, step: _Step, now_s: float) -> None:
        """Shares out the step's prompt tokens, the most urgent first, be it under way or new.

        Of those under way the lowest rank gets a part of them in any case, so it always advances.
        """
        prompts = [state for state in self.running if state.is_prefilling]
        kept = -(-step.budget // KEPT_FOR_LOWEST)
        if self._takes_whole_chunks:
            kept = self._whole_chunk(prompts[0], prompts[0].num_computed_tokens)
        step.budget -= kept
        step.max_segments -= 1
        for state in sorted(prompts, key=self.waiting.urgency):
            if self.waiting:
                self._admit(step, now_s, before=state)
            if state is prompts[0]:
                step.budget += kept
                step.max_segments += 1
            if self._takes(step, state, state.num_computed_tokens):
                self._grant(step, state)

    def _whole_chunk(self, state: RequestState, start: int) -> int:
        """Prompt tokens that a deterministic engine computes from `start` on, or none at all.

        Chunks begin at multiples of prefill_chunk_tokens and end there or with the prompt, so that
        a token is always computed in the same place of the same chunk's tokens. 0: the next token
        is one that was sampled, and is computed in a decode row, as it would have been.
        """
        end = len(state.request.prompt_token_ids)
        return min(max(end - start, 0), self._config.prefill_chunk_tokens)

    def _takes(self, step: _Step, state: RequestState, start: int) -> bool:
        """There is room for what a request computes next, from `start` on."""
        if not self._takes_whole_chunks:
            return step.takes_chunks
        has_segment = len(step.grants) < step.max_segments
        return has_segment and step.budget >= self._whole_chunk(state, start)

    def _grant(self, step: _Step, state: RequestState) -> None:
        """Gives a request that prefills its share of the step's prompt tokens.

        The last one samples, which it cannot do before it knows what may come.
        """
        rest = state.prefill_end - state.num_computed_tokens - state.waits_for_mask
        if not rest:
            return
        share = step.budget
        if self._takes_whole_chunks:
            share = self._whole_chunk(state, state.num_computed_tokens)
            if share > rest:  # it would sample
                return
        elif rest > LONG_PROMPT_CHUNKS * self._config.prefill_chunk_tokens:
            share = -(-share // 2)
        step.grants[state] = min(rest, share)
        step.budget -= min(rest, share)

    def _admit(self, step: _Step, now_s: float, before: RequestState | None = None) -> None:
        """Gives slots to waiting requests, in the policy's order, as long as their prompts fit.

        With `before` only to those whose prompts are more urgent than that one's, which runs.

        Nobody comes back in the step that preempted them: what their pages leave, once the one
        who needed them is served, is less than what they held.
        """
        while self._free_slots and (step.takes_chunks or self._takes_whole_chunks):
            state = step.newcomer or self._next(now_s)
            if state is None or state in self.preempted:
                return
            urgency = self.waiting.urgency
            if before is not None and urgency(before) < urgency(state):
                return
            hit = self.memory.lookup(state, state.prefill_end)
            start = max(state.num_computed_tokens, hit.num_pages * self._config.page_size)
            if not self._takes(step, state, start):
                return
            if not self._fits(state, hit):
                if self._reclaim(now_s):
                    continue
                return
            self.waiting.remove(state)
            self._start(state, hit, now_s)
            self._grant(step, state)
            step.newcomer = None

    def _next(self, now_s: float) -> RequestState | None:
        """Who gets a slot next; None while steps of that one are unread, or if it is to expire.

        Nobody passes it.
        """
        state = self.waiting.first(now_s)
        if state is not None and self._reserve is not None:
            state = self._admissible(state)
        if state is None or state.is_unread or self._cannot_make_it(state, now_s):
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

    def _make_chunks(self, step: _Step) -> list[PrefillChunk]:
        """Turns grants into chunks; what is left of the budget goes to the first."""
        chunks: list[PrefillChunk] = []
        for state, granted in step.grants.items():
            start = state.num_computed_tokens
            if not self._enter_cached_pages(step, state):
                step.budget += granted
                continue
            if self._takes_whole_chunks:
                if self._is_ready(step, state, granted):
                    if granted:
                        chunks.append(self._make_chunk(step, state, granted))
                    else:
                        self._resume(step, state)
                continue
            most = state.prefill_end - start - state.waits_for_mask
            length = granted + min(step.budget, most - granted)
            step.budget -= length - granted
            if not self._enter_rules(step, state):
                # The last token samples, and what that looks at is not there yet.
                length = min(length, state.prefill_end - start - 1)
            if length:
                chunks.append(self._make_chunk(step, state, length))
        return chunks

    def _make_chunk(self, step: _Step, state: RequestState, length: int) -> PrefillChunk:
        start, end = state.num_computed_tokens, state.num_computed_tokens + length
        is_insert, state.is_inserted = not state.is_inserted, True
        state.num_computed_tokens = end
        self._enter_pages(step, state, self.memory.pages(end))
        is_last = end == state.prefill_end
        if state.is_masked and (is_last if state.is_guided else is_insert):
            step.masked.append(state)
        if is_last:
            state.waits_for_mask = state.is_guided
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

    def _is_ready(self, step: _Step, state: RequestState, granted: int) -> bool:
        """Whether a request's whole chunk, or its first decode row since it came back, can run.

        What samples waits until the rule tables know all that they must; the slot row goes ahead,
        because it makes them forget whoever had the slot.
        """
        samples = state.num_computed_tokens + max(granted, 1) == state.prefill_end
        has_rules = self._enter_rules(step, state)
        is_ready = has_rules or not samples
        if not state.is_inserted and not (is_ready and granted):
            step.inserts.append(state)
            state.is_inserted = True
            if state.is_masked and not state.is_guided:
                step.masked.append(state)
        return is_ready

    def _resume(self, step: _Step, state: RequestState) -> None:
        """Gives a request that was swapped out while it decoded its first decode row."""
        self._enter_pages(step, state)
        state.num_computed_tokens += 1
        state.num_sampled += 1
        if state.num_sampled == state.max_tokens:
            self._all_dispatched.append(state)
        if state.is_guided:
            state.waits_for_mask = True
            step.masked.append(state)
        self._num_prefilling -= 1
        step.decode_kv_tokens += state.num_computed_tokens
        step.decodes.append(state)
        step.generations.append(state.generation)
        if self.waiting.keeps_count:
            self.waiting.charge(state, 1)

    def _enter_rules(self, step: _Step, state: RequestState) -> bool:
        """Enters what the rule tables must learn of a request; a long history takes steps.

        False: some is left for the next step.
        """
        if state.rule_entries is None:
            return True
        entered = list(islice(state.rule_entries, step.num_rule_entries))
        if len(entered) < step.num_rule_entries:  # there are no more
            state.rule_entries = None
        step.num_rule_entries -= len(entered)
        step.rule_entries += entered
        return state.rule_entries is None

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

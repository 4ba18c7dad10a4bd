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

from typing import override

from ..configs.engine_config import EngineConfig
from .cache_hits import Hit
from .chunk_budget import ChunkBudget
from .places import Places
from .room import could_fit, fits
from .schedule import PrefillChunk, RequestState, Schedule
from .step_costs import StepCosts
from .step_draft import StepDraft
from .step_shapes import StepShapes

LONG_PROMPT_CHUNKS = 4
"""A prompt with more chunks than this to go leaves half of each step's tokens to those behind it,
so that short prompts need not wait until a long one is through."""

KEPT_FOR_LOWEST = 8
"""One prompt token in so many is kept for the lowest rank, whoever is more urgent."""


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
        self._max_segments = StepShapes.from_config(config).max_segments
        self._takes_whole_chunks = config.deterministic

    def schedule(self, now_s: float) -> Schedule | None:
        """Decides the next step and counts it as dispatched; `preempted` says who lost a slot.

        None: there is nothing to dispatch, which happens only when every live request is in flight,
        waits for its mask or cannot make its deadline. Reading the step in flight then helps, or
        `take_mask`, or ending those that have `expired`, which names one more at least.
        """
        step = StepDraft(max_segments=self._max_segments)
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
        if step.grants:
            self._make_chunks(step)
        self._count_samples(step)
        return step.finish(self.memory)

    def take_token(self, state: RequestState, token_id: int) -> None:
        """A step was read that fed a request's last token and sampled this one.

        Only for requests that are live in the generation that the step was made for.
        """
        state.output_token_ids.append(token_id)
        if state.page_ids or state.copies:
            state.num_committed_tokens += 1
            if state.num_committed_tokens == state.publish_at:
                self.memory.publish(state)

    def take_chunk(self, chunk: PrefillChunk, token_id: int | None) -> None:
        """A step was read that computed a chunk; the last one of a prompt samples a token."""
        state = chunk.state
        if state.page_ids or state.copies:
            state.num_committed_tokens = chunk.start + chunk.length
            if state.num_committed_tokens >= state.publish_at:
                self.memory.publish(state)
        if token_id is not None:
            state.output_token_ids.append(token_id)

    def take_mask(self, state: RequestState) -> None:
        """It is known which ids may come next in a guided output."""
        state.waits_for_mask = False

    def observe(self, schedule: Schedule, measured_s: float) -> None:
        """Tells how long a step took; what is predicted of later ones follows."""
        self._predictions.observe(schedule, measured_s)

    def _displace(self, step: StepDraft, now_s: float) -> None:
        """Makes room for a waiting request that may take it from running ones; not often.

        Before the step is made, so that nobody is preempted who is part of it.
        """
        state = self._next(now_s) if self.running else None
        if state is None:
            return
        victims = self.waiting.gives_way(state, self.running)
        if self._swapping is not None:
            victims = self._swapping.first_to_fit(victims)
        if not victims or not could_fit(state, [*self.ending, *victims], self.memory):
            return
        step.newcomer = state
        for victim in victims:
            while self._free_slots:
                if self._fits(state, self.memory.lookup(state, state.prefill_end)):
                    return
                if not self._reclaim(now_s):
                    break
            self._preempt(victim, now_s, why="displaced", by=state)

    def _run_decodes(self, step: StepDraft, now_s: float) -> None:
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
                step.enter_pages(state)
            state.num_computed_tokens = computed + 1
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

    def _continue_prompts(self, step: StepDraft, now_s: float) -> None:
        """Shares out the step's prompt tokens, the most urgent first, be it under way or new.

        Of those under way the lowest rank gets a part of them in any case, so it always advances;
        unless it waits for its mask.
        """
        prompts = [state for state in self.running if state.is_prefilling]
        lowest, kept, kept_segments = prompts[0], 0, 0
        if self._rest(lowest):
            kept, kept_segments = -(-step.budget // KEPT_FOR_LOWEST), 1
            if self._takes_whole_chunks:
                kept = self._whole_chunk(lowest, lowest.num_computed_tokens)
        step.budget -= kept
        step.max_segments -= kept_segments
        for state in sorted(prompts, key=self.waiting.urgency):
            if self.waiting:
                self._admit(step, now_s, before=state)
            if state is lowest:
                step.budget += kept
                step.max_segments += kept_segments
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

    def _rest(self, state: RequestState) -> int:
        """Tokens that a request has yet to prefill and can compute now.

        The last one samples, which it cannot do before it knows what may come.
        """
        rest = state.prefill_end - state.num_computed_tokens - state.waits_for_mask
        if self._takes_whole_chunks and self._whole_chunk(state, state.num_computed_tokens) > rest:
            return 0
        return rest

    def _takes(self, step: StepDraft, state: RequestState, start: int) -> bool:
        """There is room for what a request computes next, from `start` on."""
        return step.takes(self._whole_chunk(state, start) if self._takes_whole_chunks else 1)

    def _grant(self, step: StepDraft, state: RequestState) -> None:
        """Gives a request that prefills its share of the step's prompt tokens."""
        rest = self._rest(state)
        if not rest:
            return
        share = step.budget
        if self._takes_whole_chunks:
            share = self._whole_chunk(state, state.num_computed_tokens)
        elif rest > LONG_PROMPT_CHUNKS * self._config.prefill_chunk_tokens:
            share = -(-share // 2)
        step.grants[state] = min(rest, share)
        step.budget -= min(rest, share)

    def _admit(self, step: StepDraft, now_s: float, before: RequestState | None = None) -> None:
        """Gives slots to waiting requests, in the policy's order, as long as their prompts fit.

        With `before` only to those whose prompts are more urgent than that one's, which runs.

        Nobody comes back in the step that preempted them: what their pages leave, once the one
        who needed them is served, is less than what they held.
        """
        while self._free_slots and (self._takes_whole_chunks or step.takes(1)):
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
        if state is not None and self._swapping is not None:
            state = self._swapping.admissible(state, self._has_slot_for)
        if state is None or state.is_unread or self._cannot_make_it(state, now_s):
            return None
        state.prefill_end = len(state.request.prompt_token_ids) + len(state.output_token_ids)
        return state

    def _fits(self, state: RequestState, hit: Hit) -> bool:
        size = self._config.page_size
        return fits(state, hit, memory=self.memory, running=self.running, page_size=size)

    def _make_chunks(self, step: StepDraft) -> None:
        """Turns grants into chunks; what is left of the budget goes to the first."""
        for state, granted in step.grants.items():
            start = state.num_computed_tokens
            if not step.enter_cached_pages(state, self._config.page_size):
                step.budget += granted
                continue
            if self._takes_whole_chunks:
                if not self._is_ready(step, state, granted):
                    continue
                if granted:
                    self._make_chunk(step, state, granted)
                else:
                    self._resume(step, state)
                continue
            length = granted + min(step.budget, self._rest(state) - granted)
            step.budget -= length - granted
            if not step.enter_rules(state):
                # The last token samples, and what that looks at is not there yet.
                length = min(length, state.prefill_end - start - 1)
            if length:
                self._make_chunk(step, state, length)

    def _make_chunk(self, step: StepDraft, state: RequestState, length: int) -> None:
        start, end = state.num_computed_tokens, state.num_computed_tokens + length
        is_insert, is_last = not state.is_inserted, end == state.prefill_end
        if is_insert:
            step.enter_slot_row(state)
        state.num_computed_tokens = end
        step.enter_pages(state, self.memory.pages(end))
        self._num_prefilling -= is_last
        num_fresh = end - max(start, state.num_charged_tokens)
        if self.waiting.keeps_count and num_fresh > 0:
            self.waiting.charge(state, num_fresh)
        step.chunks.append(
            PrefillChunk(
                state=state,
                start=start,
                length=length,
                is_insert=is_insert,
                is_last=is_last,
                generation=state.generation,
            )
        )

    def _is_ready(self, step: StepDraft, state: RequestState, granted: int) -> bool:
        """Whether a request's whole chunk, or its first decode row since it came back, can run.

        What samples waits until the rule tables know all that they must; the slot row goes ahead,
        because it makes them forget whoever had the slot.
        """
        samples = state.num_computed_tokens + max(granted, 1) == state.prefill_end
        has_rules = step.enter_rules(state)
        is_ready = has_rules or not samples
        if not state.is_inserted and not (is_ready and granted):
            step.inserts.append(state)
            step.enter_slot_row(state)
        return is_ready

    def _resume(self, step: StepDraft, state: RequestState) -> None:
        """Gives a request that was swapped out while it decoded its first decode row."""
        step.enter_pages(state)
        state.num_computed_tokens += 1
        self._num_prefilling -= 1
        step.decode_kv_tokens += state.num_computed_tokens
        step.decodes.append(state)
        step.generations.append(state.generation)
        if self.waiting.keeps_count:
            self.waiting.charge(state, 1)

    def _count_samples(self, step: StepDraft) -> None:
        """The step samples for its decode rows, and for whoever's prompt it ends."""
        samplers = step.decodes
        if step.chunks:
            ended = (chunk.state for chunk in step.chunks if chunk.is_last)
            samplers = [*samplers, *ended]
        for state in samplers:
            state.num_sampled += 1
            if state.num_sampled == state.max_tokens:
                self._all_dispatched.append(state)
            if state.is_guided:
                state.waits_for_mask = True
                step.masked.append(state)

"""Scheduler: which requests run in the next step, and with which pages.

Owns waiting and running requests, slots and the page pool; a function of its inputs, the clock
included. No JAX.

One order rules: the order in which requests were added. Earlier ones are admitted first, get
prompt tokens first, and are never preempted for later ones, so the earliest always advances and
everyone is served in the end.

Steps run on the device in the order in which they are dispatched. That is why slots and pages
may change hands while steps that use them are still in flight: whatever a later step writes there
comes after.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from ..configs.engine_config import EngineConfig
from .page_pool import PagePool
from .schedule import PageEntry, PrefillChunk, RequestState, Schedule
from .step_shapes import MAX_SEGMENTS

MAX_STALE_DEADLINES = 64  # beyond two for each live request


@dataclass
class _Step:
    """A Schedule while it is made; `budget` is the prompt tokens it still has room for."""

    budget: int
    decodes: list[RequestState] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    page_entries: list[PageEntry] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)

    @property
    def takes_chunks(self) -> bool:
        """There is room for one more prompt chunk."""
        return self.budget > 0 and len(self.chunks) < MAX_SEGMENTS


class Scheduler:
    """Decode rows first, then prompts under way, then admissions; preemption when pages run out.

    A live request is in exactly one of three places:

    Attributes:
      waiting: Has no slot and no pages. Ordered. A preempted request waits here too; while tokens
        of it are unread (`in_flight`) it cannot be admitted, and nobody passes it.
      running: Has a slot and the pages of its computed tokens. Ordered.
      ending: All its tokens were dispatched; it has given back slot and pages, and ends when the
        last token is read.
      pool: The pages.
    """

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        """Starts empty; `num_pages` is the size of the KV pool, page 0 included."""
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self.ending: list[RequestState] = []
        self.pool = PagePool(num_pages)
        self._config = config
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._live: dict[str, RequestState] = {}
        self._num_added = 0
        # Deadline, ordinal, id. Requests that have ended stay named until their time comes, or
        # until they are more than those that live.
        self._deadlines: list[tuple[float, int, str]] = []

    @property
    def live(self) -> dict[str, RequestState]:
        """Requests that were added and have not ended, by id, in order. Not to be changed."""
        return self._live

    def add(self, state: RequestState) -> None:
        """Queues a request and gives it its ordinal.

        Raises:
          ValueError: its id is live, or the pool could never hold it.
        """
        request_id = state.request.request_id
        if request_id in self._live:
            raise ValueError(f"request_id is {request_id!r}; it must not be that of a live request")
        needed = self._pages(state.max_kv_tokens)
        if needed > self.pool.num_usable:
            raise ValueError(
                f"request {request_id!r} grows to {needed} pages; the pool has "
                f"{self.pool.num_usable}"
            )
        state.ordinal = self._num_added
        self._num_added += 1
        self._live[request_id] = state
        if state.request.deadline_s is not None:
            heapq.heappush(self._deadlines, (state.request.deadline_s, state.ordinal, request_id))
        self.waiting.append(state)

    def remove(self, state: RequestState) -> None:
        """Ends a live request: it gives back all it holds, steps in flight or not."""
        del self._live[state.request.request_id]
        self._forget_deadlines()
        if state.slot is not None:
            self.running.remove(state)
            self._release(state)
        elif state in self.ending:
            self.ending.remove(state)
        else:
            self.waiting.remove(state)

    def _forget_deadlines(self) -> None:
        """Drops those of ended requests, once they are the most: deadlines may be days away."""
        if len(self._deadlines) > 2 * len(self._live) + MAX_STALE_DEADLINES:
            self._deadlines = [
                (state.request.deadline_s, state.ordinal, request_id)
                for request_id, state in self._live.items()
                if state.request.deadline_s is not None
            ]
            heapq.heapify(self._deadlines)

    def expired(self, now_s: float) -> list[RequestState]:
        """Live requests whose deadline has passed; each is named once."""
        states: list[RequestState] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, ordinal, request_id = heapq.heappop(self._deadlines)
            state = self._live.get(request_id)
            if state is not None and state.ordinal == ordinal:
                states.append(state)
        return states

    def schedule(self, now_s: float) -> Schedule | None:
        """Decides the next step and counts it as dispatched.

        None: there is nothing to dispatch, which happens only when no request is live or all of
        them are in flight. Reading the step in flight then helps; waiting never does.
        """
        self._release_ending()
        num_decodes = sum(not state.is_prefilling for state in self.running)
        config = self._config
        step = _Step(min(config.prefill_chunk_tokens, config.token_budget - num_decodes))
        self._run(step)
        self._admit(step, now_s)
        if not step.decodes and not step.chunks:
            return None
        return Schedule(
            decodes=tuple(step.decodes),
            chunks=tuple(step.chunks),
            page_entries=tuple(step.page_entries),
            preempted=tuple(step.preempted),
        )

    def _release_ending(self) -> None:
        """Takes slot and pages from requests that need no further step."""
        ending = [state for state in self.running if state.num_sampled == state.max_tokens]
        for state in ending:
            self.running.remove(state)
            self._release(state)
        self.ending += ending

    def _run(self, step: _Step) -> None:
        """Gives every running request its decode row or its share of the prompt tokens.

        In order, so that whoever is preempted is not part of the step yet.
        """
        at = 0
        while at < len(self.running):
            state = self.running[at]
            if not state.is_prefilling:
                if self._make_room(step, state, 1):
                    self._compute(step, state, 1)
                    step.decodes.append(state)
                    state.num_sampled += 1
            elif step.takes_chunks:
                length = min(step.budget, state.prefill_end - state.num_computed_tokens)
                if self._make_room(step, state, length):
                    self._add_chunk(step, state, length, is_insert=False)
            at += 1

    def _admit(self, step: _Step, now_s: float) -> None:
        """Gives slots to waiting requests, in order, as long as their prompts fit.

        Nobody comes back in the step that preempted them: what their pages leave, once the one
        who needed them is served, is less than what they held.
        """
        while self.waiting and self._free_slots and step.takes_chunks:
            state = self.waiting[0]
            if state.in_flight:
                return
            state.prefill_end = len(state.request.prompt_token_ids) + len(state.output_token_ids)
            needed = self._pages(min(state.prefill_end + 1, state.max_kv_tokens))
            if needed + sum(map(self._promised_pages, self.running)) > self.pool.num_free:
                return
            self.waiting.popleft()
            state.slot = self._free_slots.pop()
            state.generation += 1
            if state.admitted_s is None:
                state.admitted_s = now_s
            self.running.append(state)  # it waited, so it is later than all who run
            self._add_chunk(step, state, min(step.budget, state.prefill_end), is_insert=True)

    def _promised_pages(self, state: RequestState) -> int:
        """Pages to leave free for a running request: one to grow by, if it can grow.

        Without it a newcomer would be preempted as soon as it is admitted. No prompt is half done
        when somebody is admitted, for it would have taken all the prompt tokens of the step.
        """
        soon = min(state.num_computed_tokens + self._config.page_size, state.max_kv_tokens)
        return self._pages(soon) - len(state.page_ids)

    def _add_chunk(self, step: _Step, state: RequestState, length: int, *, is_insert: bool) -> None:
        start = state.num_computed_tokens
        self._compute(step, state, length)
        is_last = not state.is_prefilling
        step.chunks.append(
            PrefillChunk(
                state=state, start=start, length=length, is_insert=is_insert, is_last=is_last
            )
        )
        step.budget -= length
        state.num_sampled += is_last

    def _compute(self, step: _Step, state: RequestState, num_tokens: int) -> None:
        """Counts tokens as computed and hands over the pages for their KV."""
        assert state.slot is not None
        pages = self.pool.allocate(self._missing_pages(state, num_tokens))
        for page in pages:
            step.page_entries.append(
                PageEntry(slot=state.slot, column=len(state.page_ids), page=page)
            )
            state.page_ids.append(page)
        state.num_computed_tokens += num_tokens

    def _make_room(self, step: _Step, state: RequestState, num_tokens: int) -> bool:
        """Preempts the latest until the pages suffice. False: that was `state` itself."""
        while self._missing_pages(state, num_tokens) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is state:
                return False
        return True

    def _preempt(self, state: RequestState) -> None:
        """Takes slot and pages from a running request, which will start over from its tokens."""
        self.running.remove(state)
        self._release(state)
        state.num_computed_tokens = 0
        state.num_preemptions += 1
        self.waiting.appendleft(state)  # it ran, so it is earlier than all who wait

    def _release(self, state: RequestState) -> None:
        assert state.slot is not None
        self._free_slots.append(state.slot)
        state.slot = None
        self.pool.free(state.page_ids)
        state.page_ids = []

    def _missing_pages(self, state: RequestState, num_tokens: int) -> int:
        return self._pages(state.num_computed_tokens + num_tokens) - len(state.page_ids)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.page_size)

    def check(self) -> None:
        """Asserts what must hold between any two calls. Tests call it after every step."""
        self.pool.check()
        places = [*self.waiting, *self.running, *self.ending]
        assert len(places) == len(self._live), "a live request is in no place, or in two"
        assert {id(state) for state in places} == {id(state) for state in self._live.values()}
        for ordered in (self.waiting, self.running):
            ordinals = [state.ordinal for state in ordered]
            assert ordinals == sorted(ordinals), "an earlier request waits behind a later one"

        slots = [state.slot for state in self.running]
        assert sorted([*self._free_slots, *(slot for slot in slots if slot is not None)]) == list(
            range(self._config.max_num_seqs)
        ), "a slot is lost, or held twice"
        held = [page for state in self.running for page in state.page_ids]
        assert len(set(held)) == len(held), "a page is held by two requests"
        assert len(held) + self.pool.num_free == self.pool.num_usable, "a page is lost"

        for state in self.running:
            assert len(state.page_ids) == self._pages(state.num_computed_tokens)
            assert state.num_computed_tokens <= state.max_kv_tokens
        for state in (*self.waiting, *self.ending):
            assert state.slot is None, "a request holds a slot that it does not need"
            assert not state.page_ids, "a request holds pages that it does not need"
        assert len(self._deadlines) <= 2 * len(self._live) + MAX_STALE_DEADLINES
        for state in self._live.values():
            assert 0 <= state.in_flight <= 2, "more steps are in flight than are dispatched ahead"
            assert len(state.output_token_ids) <= state.num_sampled <= state.max_tokens

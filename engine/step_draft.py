"""StepDraft: a Schedule while it is made, and what it still has room for. No JAX."""

from dataclasses import dataclass, field
from itertools import islice

from .kv_memory import KVMemory
from .schedule import PageEntry, PrefillChunk, RequestState, RuleEntry, Schedule
from .step_shapes import HIT_PAGE_ENTRIES, RULE_ENTRIES


@dataclass
class StepDraft:
    """A step that is not dispatched yet; its lists, in the end, are those of Schedule.

    Attributes:
      max_segments: Most requests whose prompts it may continue, or that it may insert.
      budget: Prompt tokens that it still has room for.
      hit_room: Page-table entries of cached pages that it still has room for.
      rule_room: Entries of the rule tables that it still has room for.
      grants: Prompt tokens of each request that prefills, in order; 0: it goes on with a decode
        row.
      newcomer: For whom others lost their slots; it gets one before all others, be its turn over
        by then (decode rows of this step count too).
    """

    max_segments: int
    budget: int = 0
    hit_room: int = HIT_PAGE_ENTRIES
    rule_room: int = RULE_ENTRIES
    decodes: list[RequestState] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    decode_kv_tokens: int = 0
    grants: dict[RequestState, int] = field(default_factory=dict)
    newcomer: RequestState | None = None
    chunks: list[PrefillChunk] = field(default_factory=list)
    inserts: list[RequestState] = field(default_factory=list)
    masked: list[RequestState] = field(default_factory=list)
    page_entries: list[PageEntry] = field(default_factory=list)
    rule_entries: list[RuleEntry] = field(default_factory=list)

    def takes(self, num_tokens: int) -> bool:
        """There is room for one more prompt chunk, of so many tokens."""
        return self.budget >= num_tokens and len(self.grants) < self.max_segments

    def enter_slot_row(self, state: RequestState) -> None:
        """A request's slot row travels, and with it its mask, unless that changes."""
        state.is_inserted = True
        if state.is_masked and not state.is_guided:
            self.masked.append(state)

    def enter_rules(self, state: RequestState) -> bool:
        """Enters what the rule tables must learn of a request; a long history takes steps.

        False: some is left for the next step.
        """
        entries = state.rule_entries
        if entries is None:
            return True
        entered = list(islice(entries, self.rule_room))
        self.rule_room -= len(entered)
        self.rule_entries += entered
        if entries.is_empty:
            state.rule_entries = None
        return entries.is_empty

    def enter_cached_pages(self, state: RequestState, page_size: int) -> bool:
        """Enters the pages that were computed before its first chunk; a long prefix takes steps.

        False: some are left for the next step, and no chunk may read them yet.
        """
        missing = state.num_computed_tokens // page_size - state.num_entered_pages
        if missing <= 0:
            return True
        entered = min(missing, self.hit_room)
        self.hit_room -= entered
        self.enter_pages(state, state.num_entered_pages + entered)
        return entered == missing

    def enter_pages(self, state: RequestState, end: int | None = None) -> None:
        """Enters a request's pages up to `end`, or all, in the device's page table."""
        assert state.slot is not None
        for column in range(state.num_entered_pages, len(state.page_ids) if end is None else end):
            self.page_entries.append(PageEntry(state.slot, column, state.page_ids[column]))
            state.num_entered_pages = column + 1

    def finish(self, memory: KVMemory) -> Schedule | None:
        """The step, with the transfers and events of `memory`, which forgets them.

        None: there is nothing to dispatch, and memory keeps them for the next one.
        """
        is_change = self.page_entries or self.rule_entries or self.inserts
        if not (self.decodes or self.chunks or is_change):
            return None
        schedule = Schedule(
            decodes=tuple(self.decodes),
            generations=tuple(self.generations),
            chunks=tuple(self.chunks),
            inserts=tuple(self.inserts),
            masked=tuple(self.masked),
            page_entries=tuple(self.page_entries),
            rule_entries=tuple(self.rule_entries),
            transfers=tuple(memory.transfers),
            events=tuple(memory.events),
            decode_kv_tokens=self.decode_kv_tokens,
        )
        memory.transfers.clear()
        memory.events.clear()
        return schedule

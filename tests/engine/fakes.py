"""A device without a model, the naive run to compare with, and an engine of small sizes.

`FakeExecutor` decodes the real upload and keeps what the device keeps: page tables, and pages that
hold token ids in place of keys and values. The next token is a hash of the whole history *read
back through the page table*, so a wrong page, chunk order, insertion, preemption, cache hit or copy
becomes a wrong token, and mostly an assertion before that.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.configs.engine_config import EngineConfig
from octavo.configs.scheduling_config import SchedulingConfig
from octavo.engine import packing
from octavo.engine.admission import EngineLimits, admit, choice_id
from octavo.engine.engine import Engine
from octavo.engine.event_log import Recorder
from octavo.engine.packing import UploadLayout
from octavo.engine.request import FinishReason, Request, RequestOutput
from octavo.engine.sampling_checks import MAX_TOP_LOGPROBS
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.step_costs import StepCosts
from octavo.engine.step_shapes import StepKey, StepShapes
from octavo.engine.token_masks import num_words

from .fake_guides import FakeGuides, guided_ids
from .fake_model import EOS, VOCAB_SIZE, Rules, logprob_of, next_token, top_of

_EMPTY = -5  # what a position of a page holds before it is written


class FakeExecutor:
    """Runs steps at once when they are dispatched; `log` says in which order the host came.

    Attributes:
      log: ("dispatch" | "fetch", number of the step).
      keys: Of each step.
      uploads: Of each step.
      fail_dispatch, fail_fetch: Numbers of steps that raise.
    """

    def __init__(self, config: EngineConfig, limits: EngineLimits) -> None:
        columns = -(-(limits.max_model_len - 1) // config.page_size)
        self.config = config
        self.log: list[tuple[str, int]] = []
        self.keys: list[StepKey] = []
        self.uploads: list[bytes] = []
        self.fail_dispatch: set[int] = set()
        self.fail_fetch: set[int] = set()
        self._pages = np.full((limits.num_pages, config.page_size), _EMPTY)
        self._versions = [0] * limits.num_pages  # grows when a page is written from its start
        self._host: dict[int, np.ndarray] = {}
        self._slots = [_Slot(columns) for _ in range(config.max_num_seqs)]

    def dispatch(
        self, key: StepKey, packed: np.ndarray, mask_rows: np.ndarray | None = None
    ) -> tuple[int, np.ndarray]:
        number = len(self.keys)
        self.log.append(("dispatch", number))
        self.keys.append(key)
        self.uploads.append(packed.tobytes())
        if number in self.fail_dispatch:
            raise RuntimeError("secret details of the device")
        layout = UploadLayout(
            key,
            self.config.max_num_seqs,
            self.config.page_size,
            self.config.max_stop_ids,
            num_words(VOCAB_SIZE),
        )
        assert packed.shape == (layout.size,)
        assert packed.dtype == np.int32
        if mask_rows is None:
            mask_rows = packing.no_masks(layout)
        assert mask_rows.shape == layout.masks_shape
        return number, self._run(key, layout.split(packed.copy()) | {"mask_rows": mask_rows})

    def fetch(self, result: tuple[int, np.ndarray]) -> np.ndarray:
        number, download = result
        self.log.append(("fetch", number))
        if number in self.fail_fetch:
            raise RuntimeError("secret details of the device")
        return download

    def export_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for page, handle in pairs:
            assert handle not in self._host, "a handle is used twice"
            # That of a preempted request whose KV is kept may be the last one.
            is_full = _EMPTY not in self._pages[page]
            assert is_full or self.config.deterministic, "a page goes down that is not full"
            self._host[handle] = self._pages[page].copy()

    def import_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert len({page for _, page in pairs}) == len(pairs), "a page is named twice"
        for handle, page in pairs:
            self._pages[page] = self._host.pop(handle)
            self._versions[page] += 1

    def drop_pages(self, handles: Sequence[int]) -> None:
        for handle in handles:
            del self._host[handle]

    @property
    def num_host_pages(self) -> int:
        return len(self._host)

    def _run(self, key: StepKey, part: dict[str, np.ndarray]) -> np.ndarray:
        num_slots = len(self._slots)
        used = {}  # rows of each part that are not padding
        for name in ("slot_rows", "page_entries", "rule_entries", "segments", "mask_rows"):
            slots = part[name][:, 0]
            used[name] = part[name][slots < num_slots]
            padding = slots[slots >= num_slots]
            assert len(set(padding.tolist())) == len(padding), f"padding of {name} is not unique"
        decode_slots = part["decode_slots"].tolist()
        assert len(set(decode_slots)) == len(decode_slots), "a slot has two decode rows"
        segment_slots = used["segments"][:, packing.SEGMENT_SLOT].tolist()
        assert len(set(segment_slots)) == len(segment_slots), "a slot has two segments"
        assert not set(segment_slots) & set(decode_slots), "a slot decodes and prefills"

        num_decodes = sum(slot_id < num_slots for slot_id in decode_slots)
        num_chunk_tokens = int(used["segments"][:, packing.SEGMENT_LENGTH].sum())
        num_entries = len(used["page_entries"]) + len(used["rule_entries"])
        num_inserts = len(used["slot_rows"])
        assert num_decodes + num_chunk_tokens + num_entries + num_inserts > 0, "an empty step"
        assert num_decodes + num_chunk_tokens <= self.config.token_budget
        assert num_chunk_tokens <= self.config.prefill_chunk_tokens

        for slot, column, page in used["page_entries"].tolist():
            self._assign(slot, column, page)
        for row in used["slot_rows"].tolist():
            has_chunk = row[packing.SLOT] in segment_slots
            assert has_chunk or self.config.deterministic, "an insert without a chunk"
            self._slots[row[packing.SLOT]].insert(row)
        for slot, *entry in used["rule_entries"].tolist():
            self._slots[slot].learn(*entry)
        for slot, *words in used["mask_rows"].tolist():
            self._slots[slot].mask = ids_of(words)

        samples = np.zeros((key.samples, packing.SAMPLE_COLUMNS), np.int32)
        for at, slot_id in enumerate(decode_slots):
            if slot_id < num_slots and self._slots[slot_id].active:
                slot = self._slots[slot_id]
                self._write(slot_id, [slot.token])
                samples[at] = self._sample(slot_id)
        scores = np.zeros((key.chunk, packing.SCORE_COLUMNS), np.int32)
        at = 0
        for index, (slot_id, start, length, is_last) in enumerate(used["segments"].tolist()):
            slot = self._slots[slot_id]
            assert not slot.active, "a chunk for a request that decodes"
            if slot.is_new:
                assert start % self.config.page_size == 0, "a part of a page was cached"
                slot.kv_len, slot.is_new = start, False
            assert start == slot.kv_len, "a chunk out of order"
            if self.config.deterministic:
                end = start + length
                assert start % self.config.prefill_chunk_tokens == 0, "a chunk off the grid"
                assert is_last or end % self.config.prefill_chunk_tokens == 0, "a part of a chunk"
            assert length > 0
            assert at + length <= key.chunk, "more chunk tokens than the key has"
            for offset in range(length):
                self._write(slot_id, part["chunk_tokens"][at + offset : at + offset + 1].tolist())
                target = int(part["chunk_targets"][at + offset])
                if target != packing.NO_TOKEN:
                    history = self._history(slot_id)
                    score = packing.float_bits(logprob_of(history, target))
                    wants_top = slot.prompt_top
                    scores[at + offset] = [score, *_top_columns(history, wants_top)]
            if is_last:
                samples[key.rows + index] = self._sample(slot_id)
            at += length
        return np.concatenate([samples.reshape(-1), scores.reshape(-1)])

    def _assign(self, slot_id: int, column: int, page: int) -> None:
        slot = self._slots[slot_id]
        assert 0 < page < len(self._versions), f"page {page} does not exist or is reserved"
        assert column < slot.num_columns, "more pages than the table has columns"
        if column == 0:  # somebody new
            slot.page_table.clear()
            slot.active = False
        assert column == len(slot.page_table), "a column is skipped or set twice"
        slot.page_table.append((page, self._versions[page]))

    def _write(self, slot_id: int, tokens: list[int]) -> None:
        slot = self._slots[slot_id]
        for token in tokens:
            column, offset = divmod(slot.kv_len, self.config.page_size)
            page, _ = slot.page_table[column]
            if offset == 0:
                self._versions[page] += 1
                self._pages[page] = _EMPTY
                slot.page_table[column] = page, self._versions[page]
            page = self._readable_page(slot_id, column)
            assert self._pages[page, offset] == _EMPTY, "a position is written twice"
            self._pages[page, offset] = token
            slot.kv_len += 1

    def _history(self, slot_id: int) -> list[int]:
        slot, size = self._slots[slot_id], self.config.page_size
        pages = [self._readable_page(slot_id, column) for column in range(-(-slot.kv_len // size))]
        history = self._pages[pages].reshape(-1)[: slot.kv_len].tolist()
        assert _EMPTY not in history, "a position is read that was not written"
        return history

    def _readable_page(self, slot_id: int, column: int) -> int:
        page, version = self._slots[slot_id].page_table[column]
        assert self._versions[page] == version, "a live slot's page was given away"
        return page

    def _sample(self, slot_id: int) -> list[int]:
        slot = self._slots[slot_id]
        history = self._history(slot_id)
        rules = slot.rules()
        if not rules.may_come:
            slot.active = False
            return [0, packing.BROKEN, 0, *_top_columns(history, False)]
        token = next_token(history, slot.seed, slot.choice, rules)
        if slot.has_penalties:
            slot.counts[token] = slot.counts.get(token, 0) + 2
        slot.position += 1
        status = packing.VALID
        if token in slot.stop_ids:
            status |= packing.STOPPED
        slot.remaining -= 1
        if slot.remaining == 0:
            status |= packing.EXHAUSTED
        slot.token, slot.active = token, status == packing.VALID
        logprob = logprob_of(history, token) if slot.logprobs else 0.0
        logprob_bits = packing.float_bits(logprob)
        return [token, status, logprob_bits, *_top_columns(history, slot.top)]


def _top_columns(history: Sequence[int], is_wanted: bool) -> list[int]:
    if not is_wanted:
        return [0] * (2 * MAX_TOP_LOGPROBS)
    ids, logprobs = top_of(history, MAX_TOP_LOGPROBS)
    return [*ids, *map(packing.float_bits, logprobs)]


def ids_of(words: Sequence[int]) -> tuple[int, ...]:
    """The ids of a mask."""
    return tuple(i for i in range(VOCAB_SIZE) if words[i // 32] >> i % 32 & 1)


@dataclass
class _Slot:
    """One row of device state; an entry of the page table is a page and its version."""

    num_columns: int
    page_table: list[tuple[int, int]] = field(default_factory=list)
    is_new: bool = False
    kv_len: int = 0
    token: int = 0
    active: bool = False
    remaining: int = 0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top: bool = False
    prompt_top: bool = False
    choice: int = 0
    position: int = 0
    min_tokens: int = 0
    has_penalties: bool = False
    num_biased: int = 0
    is_masked: bool = False
    counts: dict[int, int] = field(default_factory=dict)
    biases: dict[int, tuple[int, float]] = field(default_factory=dict)
    mask: tuple[int, ...] = ()

    def learn(self, column: int, token_id: int, value: int) -> None:
        if column != packing.COUNTED:
            self.biases[column] = token_id, float(np.int32(value).view(np.float32))
        elif value:
            assert token_id not in self.counts, "an id of the history is entered twice"
            self.counts[token_id] = value

    def rules(self) -> Rules:
        may_come = self.mask if self.is_masked else range(VOCAB_SIZE)
        not_yet = self.stop_ids if self.position < self.min_tokens else ()
        return Rules(
            counts=self.counts if self.has_penalties else {},
            biases=tuple(self.biases[column] for column in range(self.num_biased)),
            may_come=tuple(token_id for token_id in may_come if token_id not in not_yet),
        )

    def insert(self, row: list[int]) -> None:
        self.kv_len, self.token = row[packing.KV_LEN], row[packing.TOKEN]
        self.active = bool(row[packing.ACTIVE])
        self.is_new = not self.active  # its first chunk says how much KV was there before
        self.remaining = row[packing.REMAINING]
        low, high = (row[at] % 2**32 for at in (packing.SEED_LOW, packing.SEED_HIGH))
        self.seed = None if row[packing.TEMPERATURE] == 0 else low | high << 32
        self.stop_ids = tuple(row[packing.STOP_IDS :])
        self.logprobs = bool(row[packing.LOGPROBS])
        self.top = bool(row[packing.TOP_LOGPROBS])
        self.prompt_top = bool(row[packing.PROMPT_TOP_LOGPROBS])
        self.choice, self.position = row[packing.CHOICE], row[packing.POSITION]
        self.min_tokens, self.num_biased = row[packing.MIN_TOKENS], row[packing.NUM_BIASED]
        self.has_penalties = bool(row[packing.HAS_PENALTIES])
        self.is_masked = bool(row[packing.IS_MASKED])
        self.counts = dict[int, int]()  # biases came before, or come in this step


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


_REQUEST_FIELDS = {field.name for field in dataclasses.fields(Request)}
_SCHEDULING_FIELDS = {field.name for field in dataclasses.fields(SchedulingConfig)}


def small_config(**changes: object) -> EngineConfig:
    """Four slots, chunks of 8 tokens, pages of 4; changes of EngineConfig or SchedulingConfig."""
    values = {"max_num_seqs": 4, "prefill_chunk_tokens": 8, "page_size": 4, "max_stop_ids": 4}
    scheduling = {name: changes.pop(name) for name in _SCHEDULING_FIELDS & set(changes)}
    return EngineConfig(**(values | changes), scheduling=SchedulingConfig(**scheduling))


def whole_pages(num_tokens: int, page_size: int) -> int:
    """So many tokens, or the few more that fill a page: what a deterministic chunk may have."""
    return -(-num_tokens // page_size) * page_size


def limits_for(config: EngineConfig, num_pages: int, max_model_len: int = 10_000) -> EngineLimits:
    return EngineLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=min(max_model_len, (num_pages - 1) * config.page_size + 1),
        num_pages=num_pages,
        eos_token_ids=(EOS,),
    )


def planned_costs(config: EngineConfig, **changes: float) -> StepCosts:
    """A step of n tokens takes 1 + n / 100 ms; a page comes back in a tenth of the time."""
    keys = StepShapes.from_config(config).all_keys()
    base_s = {key: 1e-3 + 1e-5 * (key.rows + key.chunk) for key in keys}
    return StepCosts(base_s=base_s, **({"import_page_s": 1e-6 * config.page_size} | changes))


def fake_engine(
    config: EngineConfig | None = None,
    num_pages: int = 65,
    clock: Clock | None = None,
    *,
    max_host_pages: int = 0,
    guides: FakeGuides | None = None,
    recorder: Recorder | None = None,
) -> tuple[Engine, FakeExecutor]:
    config = config or small_config()
    limits = limits_for(config, num_pages)
    executor = FakeExecutor(config, limits)
    engine = Engine(
        config,
        limits,
        executor,
        clock or Clock(),
        planned_costs(config),
        max_host_pages=max_host_pages,
        guides=guides or FakeGuides(),
        recorder=recorder,
    )
    return engine, executor


def request(
    request_id: str,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    arrival_s: float = 0.0,
    **changes: object,
) -> Request:
    """Greedy and without EOS unless said otherwise; changes of Request or SamplingParams."""
    fields = {name: changes.pop(name) for name in _REQUEST_FIELDS & set(changes)}
    sampling = {"temperature": 0.0, "ignore_eos": True} | changes
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**sampling),
        arrival_s=arrival_s,
        **fields,
    )


def add_request(engine: Engine, request: Request) -> None:
    """As EngineThread does, but for what it checks against other requests."""
    engine.add(admit(request, engine.config, engine.limits))


@dataclass
class Answer:
    """What a request brought in all."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    top: list[tuple[int, float]] = field(default_factory=list)
    prompt_top: list[tuple[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = field(default=None, compare=False)
    num_cached_tokens: int = field(default=0, compare=False)


def collect(outputs: Sequence[RequestOutput], answers: dict[str, Answer]) -> None:
    """Adds deltas to the answers, and holds them to the rules of RequestOutput."""
    for output in outputs:
        answer = answers.setdefault(choice_id(output.request_id, output.choice), Answer())
        assert answer.finish_reason is None, "an output after the last"
        assert not (output.prompt_logprobs and answer.token_ids), "prompt after output"
        answer.token_ids += output.token_ids
        answer.logprobs += output.logprobs
        answer.prompt_logprobs += output.prompt_logprobs
        answer.top += zip(output.top_token_ids, output.top_logprobs, strict=True)
        answer.prompt_top += zip(
            output.prompt_top_token_ids, output.prompt_top_logprobs, strict=True
        )
        answer.error = output.error
        answer.finish_reason = output.finish_reason
        answer.stop_token_id = output.stop_token_id
        answer.num_cached_tokens = output.num_cached_tokens
        is_last = output.finish_reason is not None
        assert (output.timings is not None) == is_last or output.finish_reason is FinishReason.ERROR
        assert output.token_ids or output.prompt_logprobs or output.finish_reason is not None


def finish(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    """Runs an engine until it is idle; raises what broke it."""
    answers = {} if answers is None else answers
    while engine.has_work:
        step(engine, answers)
    return answers


def step(engine: Engine, answers: dict[str, Answer]) -> None:
    """One step, with the invariants checked after it; raises what broke the engine.

    Masks are there when it begins, so that a run is the same each time.
    """
    engine._guides.wait(10.0)
    collect(engine.step(), answers)
    engine.check()
    if engine.failure is not None:
        raise engine.failure


def run_alone(
    request: Request, config: EngineConfig, limits: EngineLimits, choice: int = 0
) -> Answer:
    """The naive run without pages, chunks and batch, of a request that is greedy or has a seed."""
    state = admit(request, config, limits)
    sampling, prompt = request.sampling, request.prompt_token_ids
    seed = None if sampling.temperature == 0 else state.seed
    answer = Answer()
    if sampling.prompt_logprobs and choice == 0:
        answer.prompt_logprobs = [
            logprob_of(prompt[:end], prompt[end]) for end in range(1, len(prompt))
        ]
        for end in range(1, len(prompt)):
            answer.prompt_top += zip(
                *top_of(prompt[:end], sampling.prompt_top_logprobs), strict=True
            )
    history = list(prompt)
    counts = dict.fromkeys(prompt, 1) if sampling.has_penalties else {}
    allowed = sampling.allowed_token_ids
    may_come = [
        token_id
        for token_id in range(VOCAB_SIZE)
        if token_id not in sampling.banned_token_ids and (allowed is None or token_id in allowed)
    ]
    while answer.finish_reason is None:
        is_early = len(answer.token_ids) < sampling.min_tokens
        now = set(may_come)
        if sampling.guide is not None:
            now &= set(guided_ids(int(sampling.guide.text), answer.token_ids))
        later = now - set(state.stop_ids)
        if is_early and (later or sampling.guide is None):
            now = later
        if not now:
            answer.finish_reason = FinishReason.ERROR
            break
        rules = Rules(counts, sampling.logit_bias, tuple(sorted(now)))
        token = next_token(history, seed, choice, rules)
        if sampling.has_penalties:
            counts[token] = counts.get(token, 0) + 2
        answer.token_ids.append(token)
        answer.top += zip(*top_of(history, sampling.top_logprobs), strict=True)
        if sampling.logprobs:
            answer.logprobs.append(logprob_of(history, token))
        if token in state.stop_ids:
            answer.finish_reason, answer.stop_token_id = FinishReason.STOP, token
        elif len(answer.token_ids) == state.max_tokens:
            answer.finish_reason = FinishReason.LENGTH
        history.append(token)
    return answer

"""Measuring finds what steps cost, leaves no trace and ends soon.

The device is simulated where exact costs matter: it knows what it costs, tells it through its clock
alone, and holds every step to the rules of the pages. What would break this: a context that is not
what the step reads, rows that run out of pages or share a place, a request left in a slot.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine import build, packing
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.engine.executor import DeviceExecutor
from octavo.engine.measure import SHORTEST_S, measure_costs
from octavo.engine.packing import UploadLayout
from octavo.engine.page_transfer import PAGES_PER_TRANSFER
from octavo.engine.step_costs import StepCosts, chunk_kv_tokens
from octavo.engine.step_shapes import StepKey

from .conftest import TINY_ENGINE, Model, ignore_progress
from .fakes import add_request, finish, request

# About what SmolLM2 takes on two cores.
DECODE_S = {2: 0.020, 8: 0.031, 16: 0.045, 32: 0.067}
MIXED_S = {16: 0.030, 64: 0.075, 256: 0.210}


def planned_costs(layouts: Sequence[UploadLayout]) -> StepCosts:
    def base_s(key: StepKey) -> float:
        mixed = MIXED_S.get(key.chunk, 0.001 * key.chunk) + 0.001 * key.rows
        return mixed if key.chunk else DECODE_S.get(key.rows, 0.002 * key.rows)

    return StepCosts(
        base_s={layout.key: base_s(layout.key) for layout in layouts},
        decode_kv_token_s=2e-6,
        chunk_kv_token_s=6e-7,
        import_page_s=7e-5,
        import_s=3e-4,
    )


class SimulatedDevice(DeviceExecutor):
    """Keeps slots and page tables like the device, costs what was planned, and has no pages.

    Attributes:
      clock_s: Its time.
      first_run_s: What the first run of an executable takes besides.
      steps: Keys that ran.
      num_stopped_rows: Decode rows, over all steps, of slots that had stopped.
    """

    def __init__(
        self,
        layouts: Sequence[UploadLayout],
        *,
        num_pages: int,
        pages_per_seq: int,
        can_keep_pages: bool = False,
        first_run_s: float = 0.0,
    ) -> None:
        self.can_keep_pages = can_keep_pages
        self.clock_s = 0.0
        self.first_run_s = first_run_s
        self.steps: list[StepKey] = []
        self.num_stopped_rows = 0
        self.costs = planned_costs(layouts)
        self._layouts = {layout.key: layout for layout in layouts}
        self._pages = num_pages
        self._handles: set[int] = set()
        some = layouts[0]
        self.active = np.zeros(some.num_slots, bool)
        self.kv_len = np.zeros(some.num_slots, int)
        self.remaining = np.zeros(some.num_slots, int)
        self.page_table = np.zeros((some.num_slots, pages_per_seq), int)

    def clock(self) -> float:
        return self.clock_s

    def dispatch(
        self, key: StepKey, packed: np.ndarray, mask_rows: np.ndarray | None = None
    ) -> Any:
        assert mask_rows is None
        layout = self._layouts[key]
        part = layout.split(packed)
        for row in part["slot_rows"]:
            if (slot := row[packing.SLOT]) < layout.num_slots:
                self.active[slot] = row[packing.ACTIVE]
                self.kv_len[slot] = row[packing.KV_LEN]
                self.remaining[slot] = row[packing.REMAINING]
        entered = [entry for entry in part["page_entries"] if entry[0] < layout.num_slots]
        assert len({(slot, column) for slot, column, _ in entered}) == len(entered)
        for slot, column, page in entered:
            assert 0 < page < self._pages
            self.page_table[slot, column] = page

        places: list[tuple[int, int]] = []
        decode_tokens = chunk_tokens = 0
        rows = [slot for slot in part["decode_slots"] if slot < layout.num_slots]
        segments = [row for row in part["segments"] if row[packing.SEGMENT_SLOT] < layout.num_slots]
        slots = [*rows, *(row[packing.SEGMENT_SLOT] for row in segments)]
        assert len({*slots}) == len(slots)
        self.num_stopped_rows += sum(not self.active[slot] for slot in rows)
        for slot in rows:
            if self.active[slot]:
                places.append(self._place(slot, self.kv_len[slot], layout.page_size))
                self.kv_len[slot] += 1
                self.remaining[slot] -= 1
                self.active[slot] = self.remaining[slot] > 0
                decode_tokens += int(self.kv_len[slot])
        for row in segments:
            slot, start = row[packing.SEGMENT_SLOT], int(row[packing.SEGMENT_START])
            length = int(row[packing.SEGMENT_LENGTH])
            places += [self._place(slot, start + i, layout.page_size) for i in range(length)]
            chunk_tokens += chunk_kv_tokens(start, length)
            self.active[slot], self.kv_len[slot] = False, start + length
        assert len({*places}) == len(places), "two rows write the same place"
        self.clock_s += self.costs.step_s(
            key, decode_kv_tokens=decode_tokens, chunk_kv_tokens=chunk_tokens
        )
        if key not in self.steps:
            self.clock_s += self.first_run_s
        self.steps.append(key)
        return None

    def _place(self, slot: int, position: int, page_size: int) -> tuple[int, int]:
        page = int(self.page_table[slot, position // page_size])
        assert page > 0, "page 0 stays zero"
        return page, position % page_size

    def fetch(self, result: Any) -> np.ndarray:
        return np.zeros(0, np.int32)

    def export_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for page, handle in pairs:
            assert 0 < page < self._pages
            assert handle < 0, "the engine's handles begin at 0"
            assert handle not in self._handles
            self._handles.add(handle)

    def import_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert len({page for _, page in pairs}) == len(pairs) <= PAGES_PER_TRANSFER
        for handle, _ in pairs:
            self._handles.remove(handle)
        self.clock_s += self.costs.import_page_s * len(pairs)

    def wait(self) -> None:
        # All calls between two waits share the cost of there being any.
        self.clock_s += self.costs.import_s

    @property
    def is_clean(self) -> bool:
        return not self.active.any() and not self._handles


def layouts_of(config: EngineConfig) -> list[UploadLayout]:
    return packing.upload_layouts(config, 40)


def measured(device: SimulatedDevice, config: EngineConfig, **sizes: int) -> StepCosts:
    costs = measure_costs(device, layouts_of(config), clock=device.clock, **sizes)
    assert device.is_clean
    assert costs.base_s.keys() == {layout.key for layout in layouts_of(config)}
    return costs


def test_what_a_step_costs_is_found():
    """With a pool of the usual size, and a first run that must not count."""
    sizes = {"num_pages": 11_650, "pages_per_seq": 512}
    device = SimulatedDevice(
        layouts_of(EngineConfig()), **sizes, can_keep_pages=True, first_run_s=1.0
    )
    costs = measured(device, EngineConfig(), **sizes)
    planned = device.costs
    assert device.num_stopped_rows == 0, "what was measured as full was not"
    for key, base_s in costs.base_s.items():
        # Rows that run at all have a few tokens of context.
        assert base_s == pytest.approx(planned.base_s[key], rel=0.05), key
    assert costs.decode_kv_token_s == pytest.approx(planned.decode_kv_token_s, rel=0.05)
    assert costs.chunk_kv_token_s == pytest.approx(planned.chunk_kv_token_s, rel=0.05)
    assert costs.import_page_s == pytest.approx(planned.import_page_s)
    assert costs.import_s == pytest.approx(planned.import_s)


def test_the_default_model_is_measured_within_seconds():
    """Half of it is the first run of each, which somebody has to wait for anyway."""
    sizes = {"num_pages": 11_650, "pages_per_seq": 512}
    device = SimulatedDevice(layouts_of(EngineConfig()), **sizes)
    measured(device, EngineConfig(), **sizes)
    assert device.clock_s < sum(device.costs.base_s.values()) + 3.0


@pytest.mark.parametrize("page_size", [1, 3, 16, 1024])
@pytest.mark.parametrize("num_pages", [2, 3, 7, 40, 3000])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 33])
@pytest.mark.parametrize("pages_per_seq", [1, 5, 400])
def test_any_pool_is_measured_and_none_of_its_rules_broken(
    page_size: int, num_pages: int, max_num_seqs: int, pages_per_seq: int
):
    """The simulated device asserts them: page 0, places that differ, slots that differ."""
    config = EngineConfig(
        page_size=page_size, max_num_seqs=max_num_seqs, prefill_chunk_tokens=70, max_stop_ids=2
    )
    sizes = {"num_pages": num_pages, "pages_per_seq": pages_per_seq}
    device = SimulatedDevice(layouts_of(config), **sizes, can_keep_pages=True)
    costs = measured(device, config, **sizes)
    for key, base_s in costs.base_s.items():
        # The margin is what the context of small pools blurs.
        assert 0.5 * device.costs.base_s[key] <= base_s <= 1.5 * device.costs.base_s[key]
    assert 0 <= costs.decode_kv_token_s < 3 * device.costs.decode_kv_token_s
    assert 0 <= costs.chunk_kv_token_s < 3 * device.costs.chunk_kv_token_s
    assert costs.import_page_s == pytest.approx(device.costs.import_page_s)
    assert len(device.steps) < 250


def test_a_clock_that_stands_still_gives_costs_that_can_be_counted_with():
    sizes = {"num_pages": 100, "pages_per_seq": 20}
    device = SimulatedDevice(layouts_of(EngineConfig()), **sizes)
    costs = measure_costs(device, layouts_of(EngineConfig()), clock=lambda: 7.0, **sizes)
    assert {*costs.base_s.values()} == {SHORTEST_S}
    assert costs.decode_kv_token_s == costs.chunk_kv_token_s == 0.0


def test_noise_makes_no_slope_negative():
    """Long contexts that seem to take less than short ones cost nothing, not less than nothing."""
    sizes = {"num_pages": 3000, "pages_per_seq": 400}
    device = SimulatedDevice(layouts_of(EngineConfig()), **sizes)
    device.costs = replace(
        device.costs, decode_kv_token_s=-1e-7, chunk_kv_token_s=-1e-8, import_page_s=-1e-6
    )
    costs = measured(device, EngineConfig(), **sizes)
    assert costs.decode_kv_token_s == costs.chunk_kv_token_s == 0.0
    assert min(costs.base_s.values()) > 0.0


def _answers(engine: Engine) -> list[Any]:
    for number in range(12):  # more than there are slots
        add_request(
            engine,
            request(
                str(number),
                range(3 * number, 7 * number + 1),
                max_tokens=30,
                temperature=0.8 * (number % 2),
                seed=number,
                logprobs=True,
            ),
        )
    answers = finish(engine)
    assert engine.failure is None
    return [(answers[str(n)].token_ids, answers[str(n)].logprobs) for n in range(12)]


def test_measuring_changes_no_output(
    tiny_model: Model, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    """Garbage in the pages, and what is left in slots and page tables, is never read."""

    def planned(executor: DeviceExecutor, layouts: Sequence[UploadLayout], **_: Any) -> StepCosts:
        return planned_costs(layouts)

    monkeypatch.setattr(build, "measure_costs", planned)
    unmeasured = tiny_model.build(TINY_ENGINE)
    executor: Any = unmeasured._executor
    assert not any(np.asarray(leaf).any() for leaf in executor._state)
    assert _answers(tiny_engine) == _answers(unmeasured)


def test_a_built_engine_knows_its_costs_and_has_empty_slots(tiny_model: Model):
    config = replace(TINY_ENGINE, host_kv_bytes=1_000_000)
    built = build_engine(
        tiny_model.checkpoint,
        config,
        eos_token_ids=tiny_model.checkpoint.eos_token_ids,
        clock=time.monotonic,
        on_progress=ignore_progress,
    )
    costs = built.costs
    assert costs.base_s.keys() == {layout.key for layout in layouts_of(config)}
    assert 0 < min(costs.base_s.values()) <= max(costs.base_s.values()) < 10
    assert costs.import_s + costs.import_page_s > 0
    executor: Any = built.engine._executor
    leaves = [np.asarray(leaf) for leaf in executor._state]
    kv, rows = leaves[: executor._num_kv_leaves], leaves[executor._num_kv_leaves]
    assert not rows[:, packing.ACTIVE].any()
    assert not executor._on_host
    for leaf in kv:
        assert not leaf[0].any(), "page 0 stays zero"
        assert leaf.any(), "nothing was measured on real pages"

"""Predictions follow the steps that were measured, and whoever asks gets the same answer."""

import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine.predictions import MAX_DRIFT, MIN_DRIFT, Predictions
from octavo.engine.schedule import PrefillChunk, RequestState, Schedule, Transfer, TransferKind
from octavo.engine.scheduler import Scheduler
from octavo.engine.step_shapes import StepKey

from .fakes import planned_costs, request, small_config
from .test_scheduler import Driver

CONFIG = small_config(prefill_chunk_tokens=64)
CHUNK_S = 1.66e-3  # 64 prompt tokens beside two rows


def state(
    request_id: str, deadline_s: float | None = None, ttft_target_s: float | None = None
) -> RequestState:
    one = request(request_id, [1] * 640, deadline_s=deadline_s, ttft_target_s=ttft_target_s)
    return RequestState(request=one, max_tokens=4, stop_ids=())


def schedule(*transfers: Transfer) -> Schedule:
    chunk = PrefillChunk(
        state=state("r"), start=0, length=64, is_insert=True, is_last=False, generation=1
    )
    return Schedule(decodes=(), chunks=(chunk,), page_entries=(), transfers=transfers)


def test_everything_but_copies_follows_the_last_steps():
    costs = planned_costs(CONFIG, decode_kv_token_s=1e-6, import_s=0.5)
    learns = Predictions(CONFIG, costs)
    key = StepKey(2, 64)
    assert learns.step_s(key, decode_kv_tokens=9) == costs.step_s(key, decode_kv_tokens=9)
    for _ in range(50):
        learns.observe(schedule(), 3 * CHUNK_S)
    expected = 3 * costs.step_s(key, decode_kv_tokens=9)
    assert learns.step_s(key, decode_kv_tokens=9) == pytest.approx(expected, rel=1e-3)
    assert learns.prefill_s(64, 128) == pytest.approx(3 * costs.prefill_s(64, 128), rel=1e-3)
    assert learns.import_pages_s(4) == costs.import_pages_s(4)


def test_one_slow_step_does_not_change_the_pace():
    """A pause of the machine is no measure of the device."""
    learns = Predictions(CONFIG, planned_costs(CONFIG))
    learns.observe(schedule(), 100.0)
    assert learns._drift <= 1 + 0.2 * (MAX_DRIFT - 1)
    for _ in range(1000):
        learns.observe(schedule(), 0.0)
    assert learns._drift == pytest.approx(MIN_DRIFT)


def test_a_step_that_waited_for_pages_from_the_host_says_nothing():
    """Breaks if copies are taken for a slow device: each of these takes three steps' time."""
    learns = Predictions(CONFIG, planned_costs(CONFIG))
    for _ in range(20):
        learns.observe(schedule(Transfer(TransferKind.IMPORT, 1, 1)), 4 * CHUNK_S)
    assert learns._drift == 1.0
    for kind in (TransferKind.EXPORT, TransferKind.DROP):
        learns.observe(schedule(Transfer(kind, 1, 1)), 4 * CHUNK_S)
    assert learns._drift > 1.0


def _scheduler(config: EngineConfig, times_as_fast: float) -> Scheduler:
    """Which has seen a device that is so much faster than measured at start."""
    scheduler = Scheduler(config, 1000, planned_costs(config))
    for _ in range(50):
        scheduler.observe(schedule(), CHUNK_S / times_as_fast)
    return scheduler


@pytest.mark.parametrize(("times_as_fast", "expired"), [(1.0, ["r"]), (3.9, []), (0.5, ["r"])])
def test_who_cannot_make_it_is_known_from_the_last_steps(times_as_fast: float, expired: list[str]):
    """Breaks if a start on a busy machine ends requests that could be served, for ever.

    640 tokens take 16.6 ms as planned.
    """
    scheduler = _scheduler(CONFIG, times_as_fast)
    scheduler.add(state("r", deadline_s=5e-3))
    assert [each.request.request_id for each in scheduler.expired(0.0)] == expired


@pytest.mark.parametrize(("times_as_fast", "first"), [(1.0, "feasible"), (3.9, "tight")])
def test_the_policy_knows_it_as_well(times_as_fast: float, first: str):
    config = small_config(prefill_chunk_tokens=64, policy="deadline")
    scheduler = _scheduler(config, times_as_fast)
    scheduler.add(state("tight", ttft_target_s=5e-3))
    scheduler.add(state("feasible", ttft_target_s=1.0))
    step = scheduler.schedule(0.0)
    assert step is not None
    assert step.chunks[0].state.request.request_id == first


@pytest.mark.parametrize(("times_as_fast", "imports"), [(1.0, True), (3.9, False)])
def test_what_is_fetched_from_the_host_depends_on_it(times_as_fast: float, imports: bool):
    """Two pages come back in 0.1 ms; computing them takes 0.2 ms as planned."""
    driver = Driver(CONFIG, 4, planned_costs(CONFIG, import_page_s=5e-5), max_host_pages=9)
    for _ in range(50):
        driver.scheduler.observe(schedule(), CHUNK_S / times_as_fast)
    first, other, again = (
        RequestState(request=request(name, [token] * 9), max_tokens=1, stop_ids=())
        for name, token in (("first", 1), ("other", 2), ("again", 1))
    )
    for each in (first, other, again):
        driver.add(each)
        while driver.scheduler.live:
            driver.step()
    assert driver.scheduler.memory.exported_pages >= 2
    assert again.num_cached_tokens == (8 if imports else 0)

"""Chunks that wait for a mask: what others may take meanwhile, and what is kept for them."""

import pytest

from octavo.engine.sampling_params import Guide
from octavo.engine.schedule import RequestState

from .fake_guides import guide
from .fakes import request, small_config
from .test_scheduler import Driver, chunks


def due(
    name: str, num_prompt: int, target_s: float, guided_by: Guide | None = None
) -> RequestState:
    """Of the tenant of that name, with a TTFT target."""
    one = request(name, [1] * num_prompt, tenant=name, ttft_target_s=target_s, guide=guided_by)
    return RequestState(request=one, max_tokens=3, stop_ids=())


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_kept_for_a_chunk_that_waits_for_its_mask(deterministic: bool) -> None:
    """Of those that run: `a` has the lowest rank, and `b` is served less and so more urgent."""
    config = small_config(
        policy="fair",
        deterministic=deterministic,
        page_size=4,
        prefill_chunk_tokens=4,
        tenant_weights=(("a", 0.1),),
        prefix_cache=False,
    )
    scheduler = Driver(config, 30).scheduler
    scheduler.add(due("a", 5, 9.0, guide(1)))
    scheduler.add(due("b", 12, 9.0))
    made = [scheduler.schedule(float(at)) for at in range(4)]
    assert [each and chunks(each) for each in made] == [
        [("a", 0, 4)],
        [("b", 0, 4)],
        [("b", 4, 4)],
        [("b", 8, 4)],
    ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_newcomer_that_is_more_urgent_takes_what_a_waiting_chunk_cannot(
    deterministic: bool,
) -> None:
    """Not `later`, which is behind both."""
    config = small_config(
        policy="deadline",
        deterministic=deterministic,
        page_size=4,
        prefill_chunk_tokens=4,
        prefix_cache=False,
    )
    scheduler = Driver(config, 30).scheduler
    scheduler.add(due("waits", 5, 20.0, guide(1)))
    scheduler.add(due("later", 12, 30.0))
    made = [scheduler.schedule(float(at)) for at in range(2)]
    scheduler.add(due("urgent", 4, 10.0))
    made.append(scheduler.schedule(2.0))
    assert [each and chunks(each) for each in made] == [
        [("waits", 0, 4)],
        [("later", 0, 4)],
        [("urgent", 0, 4)],
    ]


def test_a_chunk_that_samples_waits_whole_for_its_mask() -> None:
    """Breaks if what needs no mask goes ahead: the rest would be computed at another place."""
    config = small_config(deterministic=True, page_size=4, prefill_chunk_tokens=4)
    scheduler = Driver(config, 20).scheduler
    one = RequestState(request=request("a", [1] * 7, guide=guide(1)), max_tokens=3, stop_ids=())
    scheduler.add(one)
    first = scheduler.schedule(0.0)
    assert first is not None
    assert chunks(first) == [("a", 0, 4)]
    assert scheduler.schedule(1.0) is None
    scheduler.take_mask(one)
    second = scheduler.schedule(2.0)
    assert second is not None
    assert chunks(second) == [("a", 4, 3)]

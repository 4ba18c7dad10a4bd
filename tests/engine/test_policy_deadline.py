"""Earliest deadline first, with a way out for those that cannot make it."""

from octavo.engine.policy_deadline import LATE_TARGETS, DeadlineQueue

from .fakes import planned_costs, small_config
from .policy_queues import drain, fill, state


def deadline_queue(default_target_s: float = 10.0) -> DeadlineQueue:
    """Its 8 tokens of prompt take 1.1 ms."""
    return DeadlineQueue(default_target_s, planned_costs(small_config()))


def test_deadline_the_first_due_is_next():
    """Those without a target are due by the default."""
    queue = deadline_queue(10.0)
    fill(
        queue,
        state("default"),
        state("tight", ttft_target_s=1.0),
        state("earlier", ttft_target_s=11.0, arrival_s=-3.0),
        state("loose", ttft_target_s=100.0),
        state("tie", ttft_target_s=10.0),
    )
    assert drain(queue) == ["tight", "earlier", "default", "tie", "loose"]


def test_deadline_who_cannot_make_it_gives_way_to_who_can():
    """Earliest first alone makes everybody late in overload, because it goes on with the latest."""
    queue = deadline_queue(10.0)
    fill(
        queue,
        state("hopeless", prompt=80, ttft_target_s=0.5),  # 11 ms
        state("just", prompt=80, ttft_target_s=0.511),
        state("fine", ttft_target_s=1.0),
    )
    assert drain(queue, now_s=0.4995) == ["just", "fine", "hopeless"]


def test_deadline_hopeless_ones_wait_no_longer_than_a_bound():
    """Breaks if they stand behind everybody who ever comes: one is next LATE_TARGETS later."""
    queue = deadline_queue(1.0)
    fill(queue, state("late", prompt=80, ttft_target_s=0.001))
    ordinal, served_s = 1, None
    for step in range(200):
        now_s = step / 10
        fresh = state(f"fresh{step}", arrival_s=now_s, ttft_target_s=1.0)
        fresh.ordinal, fresh.prefill_end, fresh.num_uncached_tokens = ordinal, 4, 4
        ordinal += 1
        queue.push(fresh)
        first = queue.first(now_s)
        assert first is not None
        queue.remove(first)
        queue.depart(first)
        if first.request.request_id == "late":
            served_s = now_s
            break
    assert served_s is not None
    assert served_s <= LATE_TARGETS * 1.0 + 0.2


def test_deadline_a_preempted_request_is_not_hopeless():
    """It had its chance in time; behind everybody it would starve with what it holds unread."""
    queue = deadline_queue(1.0)
    again, fresh = state("again", ttft_target_s=0.001), state("fresh")
    again.num_preemptions = 1
    fill(queue, again, fresh)
    assert drain(queue, now_s=0.5) == ["again", "fresh"]


def test_deadline_remembers_only_who_is_live():
    queue = deadline_queue(0.001)
    for ordinal in range(500):
        each = state("r", prompt=80)
        each.ordinal, each.prefill_end, each.num_uncached_tokens = ordinal, 80, 80
        queue.push(each)
        assert queue.first(5.0) is each
        queue.remove(each)
        queue.depart(each)
    assert not queue._late_ordinals

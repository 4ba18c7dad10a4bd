"""A queue of waiting requests keeps nothing of those that are gone."""

from octavo.engine.keyed_queue import MAX_STALE_ENTRIES, KeyedQueue
from octavo.engine.policy_fcfs import FcfsQueue

from .policy_queues import state


def test_a_queue_keeps_no_trace_of_requests_that_are_gone():
    """A million requests come and go beside one that waits; also while their tenant is blocked.

    Breaks if a blocked tenant's entries are only dropped when it is unblocked: one long request
    that holds the tenant's last slot may run for hours.
    """
    queue = KeyedQueue(FcfsQueue().rank)
    waits = state("waits")
    queue.push(waits)
    for is_blocked in (False, True):
        if is_blocked:
            queue.block("")
        for ordinal in range(1, 2000):
            passing = state("passing")
            passing.ordinal = ordinal
            queue.push(passing)
            assert queue.first() is (None if is_blocked else waits)
            queue.remove(passing)
        kept = len(queue._heap) + sum(map(len, queue._blocked.values()))
        assert kept <= 2 * (2 + MAX_STALE_ENTRIES)
    queue.unblock("")
    assert queue.first() is waits

"""Whether there are pages for a waiting request, beside those that run. No JAX."""

from collections.abc import Sequence

from .cache_hits import Hit
from .kv_memory import KVMemory
from .schedule import RequestState

MAX_DOUBLINGS = 20


def fits(
    state: RequestState,
    hit: Hit,
    *,
    memory: KVMemory,
    running: Sequence[RequestState],
    page_size: int,
) -> bool:
    """There are pages for its prompt and its first token, and for all others to grow.

    All need room to grow, or the newcomer would be preempted as soon as it is admitted. One that
    was preempted before needs twice the room each time, so it cannot come back often to lose what
    it computed.
    """
    growth = page_size << min(state.num_preemptions, MAX_DOUBLINGS)
    soon = state.prefill_end + (growth if state.num_preemptions else 1)
    room = memory.num_available - memory.num_needed(hit, min(soon, state.max_kv_tokens))
    for other in running:
        if room < 0:
            break
        computed = max(other.num_computed_tokens, other.prefill_end)
        soon = min(computed + growth, other.max_kv_tokens)
        room -= memory.pages(soon) - len(other.page_ids)
    return room >= 0


def could_fit(state: RequestState, leavers: Sequence[RequestState], memory: KVMemory) -> bool:
    """Whether there might be pages for it if all leavers gave back theirs.

    Those who run ahead of it may hold too many; then nobody need give way for nothing.
    """
    hit = memory.lookup(state, state.prefill_end)
    needed = memory.num_needed(hit, min(state.prefill_end + 1, state.max_kv_tokens))
    missing = needed - memory.num_available
    return missing <= 0 or memory.num_gained(hit, leavers) >= missing

"""What the device's rule tables must learn of a request that gets a slot. No JAX.

Counts are made from token ids, never from what steps computed: so a prompt from the cache, in
chunks, or computed again after a preemption is penalised alike.
"""

from collections import Counter
from collections.abc import Iterator

from . import packing
from .schedule import RequestState, RuleEntries, RuleEntry


def rule_entries(state: RequestState) -> RuleEntries | None:
    """One entry for each bias, and for each id that it has read or said if that counts.

    None: it has no such rules. Entries are made when they are taken, because a step takes few, and
    a long prompt has many. Nothing is said meanwhile: no token is sampled before all were taken.
    """
    sampling = state.request.sampling
    return RuleEntries(_entries(state)) if sampling.logit_bias or sampling.has_penalties else None


def _entries(state: RequestState) -> Iterator[RuleEntry]:
    slot, sampling = state.slot, state.request.sampling
    assert slot is not None
    for column, (token_id, bias) in enumerate(sampling.logit_bias):
        yield RuleEntry(slot, column, token_id, packing.float_bits(bias))
    if not sampling.has_penalties:
        return
    said, read = Counter(state.output_token_ids), set[int]()
    for token_id in state.request.prompt_token_ids:
        if token_id not in read:
            read.add(token_id)
            yield _count(slot, token_id, said[token_id], is_read=True)
    for token_id, times in said.items():
        if token_id not in read:
            yield _count(slot, token_id, times, is_read=False)


def _count(slot: int, token_id: int, times: int, *, is_read: bool) -> RuleEntry:
    count = min(times, packing.MOST_TIMES) << packing.COUNT_SHIFT
    return RuleEntry(slot, packing.COUNTED, token_id, count | is_read)

"""What the device's rule tables must learn of a request that gets a slot. No JAX.

Counts are made from token ids, never from what steps computed: so a prompt from the cache, in
chunks, or computed again after a preemption is penalised alike.
"""

from collections import Counter

from . import packing
from .schedule import RequestState, RuleEntry


def rule_entries(state: RequestState) -> list[RuleEntry]:
    """One entry for each id that it has said or read, if that counts, and for each bias."""
    slot, sampling = state.slot, state.request.sampling
    assert slot is not None
    entries = [
        RuleEntry(slot, column, token_id, packing.float_bits(bias))
        for column, (token_id, bias) in enumerate(sampling.logit_bias)
    ]
    if sampling.has_penalties:
        said = Counter(state.output_token_ids)
        read = set(state.request.prompt_token_ids)
        for token_id in sorted(read | said.keys()):
            times = min(said[token_id], packing.MOST_TIMES)
            value = (times << packing.COUNT_SHIFT) | (token_id in read)
            entries.append(RuleEntry(slot, packing.COUNTED, token_id, value))
    return entries

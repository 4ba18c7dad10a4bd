"""What admission wants to know of requests under way: small records, one for each turn. No JAX."""

import enum
from typing import NamedTuple


class ProgressKind(enum.Enum):
    """What happened to a request."""

    EXPECTED = "expected"  # it began to wait; tokens: what it must compute, as the cache is now
    STARTED = "started"  # it got a slot; tokens: those that it need not compute
    COMPUTED = "computed"  # a step computes a part of its prompt; tokens: so many
    REQUEUED = "requeued"  # it lost its slot; tokens: its prompt and outputs


class Progress(NamedTuple):
    """One turn of one request."""

    kind: ProgressKind
    request_id: str
    num_tokens: int

"""Events: what the scheduler decided, when and why, as flat records. No JAX.

The time is the clock that the scheduler was given. A log of them, with what was asked of the
scheduler in between, reproduces a run (engine.event_log, engine.replay).
"""

import enum
from dataclasses import dataclass

type DetailValue = float | int | str | bool


class EventKind(enum.StrEnum):
    """What was decided; behind each the fields of its detail."""

    # slot, cached_tokens, imported_pages, and unless it was swapped out: miss (MissReason),
    # miss_at_token
    ADMITTED = "admitted"
    DECIDED = "decided"  # restore or recompute: pages, import_s, recompute_s, imports (bool)
    PREEMPTED = "preempted"  # why: "pages" or "displaced", by (request id), computed_tokens
    EVICTED = "evicted"  # reason (EvictionReason), age_s since last use
    EXPORTED = "exported"  # age_s since last use


@dataclass(frozen=True, slots=True)
class Event:
    """One decision.

    Attributes:
      at_s: The scheduler's clock.
      kind: What was decided.
      request_id: For whom; "" if it is about nobody in particular.
      detail: Named values; see EventKind.
    """

    at_s: float
    kind: EventKind
    request_id: str
    detail: dict[str, DetailValue]

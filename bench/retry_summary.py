"""From visits to numbers: who was refused, who got in, and whether the waits were right."""

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .open_loop import Visit


@dataclass(frozen=True, kw_only=True)
class RetrySummary:
    """What came of one run.

    Attributes:
      sent: Clients.
      refused: Those whose first try was.
      let_in_at_retry: Those of them whose second try was not.
      share: let_in_at_retry of refused; None if nobody was refused.
      served_per_s: Requests completed per second, while clients kept coming.
      promised_p50_s: Waits that the refused were told, the median; None without refusals.
      promised_p90_s: The wait that nine of ten of them do not exceed.
      needed_p50_s: Waits that a single line before the door would have meant, the median.
      needed_p90_s: The same for nine of ten.
    """

    sent: int
    refused: int
    let_in_at_retry: int
    share: float | None
    served_per_s: float
    promised_p50_s: float | None
    promised_p90_s: float | None
    needed_p50_s: float | None
    needed_p90_s: float | None


def summarize_retries(visits: Sequence[Visit], num_places: int) -> RetrySummary:
    """Numbers of a run, at least one of whose visits was served.

    Args:
      visits: Of all clients.
      num_places: Requests that could run and wait at once.
    """
    refused = [visit for visit in visits if visit.refused_s is not None]
    promised_s = [visit.promised_s for visit in refused if visit.promised_s is not None]
    needed_s = waits_needed_s(visits, num_places)
    let_in = sum(visit.is_let_in for visit in refused)
    began_s, closed_s = min(v.came_s for v in visits), max(v.came_s for v in visits)
    ended = sum(visit.ended_s is not None and visit.ended_s <= closed_s for visit in visits)
    return RetrySummary(
        sent=len(visits),
        refused=len(refused),
        let_in_at_retry=let_in,
        share=let_in / len(refused) if refused else None,
        served_per_s=ended / (closed_s - began_s),
        promised_p50_s=statistics.median(promised_s) if promised_s else None,
        promised_p90_s=_p90(promised_s),
        needed_p50_s=statistics.median(needed_s) if needed_s else None,
        needed_p90_s=_p90(needed_s),
    )


def waits_needed_s(visits: Sequence[Visit], num_places: int) -> list[float]:
    """How long each refused client would have waited in one line, at the pace that was seen.

    The line lets in by arrival: whoever has n others before it, places not counted, gets in when
    the n-th request has ended. Clients who were never served are not before anybody.
    """
    came_s = sorted(visit.came_s for visit in visits if visit.is_let_in)
    ended_s = sorted(visit.ended_s for visit in visits if visit.ended_s is not None)
    waits_s = []
    for visit in visits:
        if visit.refused_s is None:
            continue
        leave_first = bisect.bisect_left(came_s, visit.came_s) - num_places
        due_s = ended_s[leave_first] if 0 <= leave_first < len(ended_s) else visit.refused_s
        waits_s.append(max(0.0, due_s - visit.refused_s))
    return waits_s


def _p90(values: Sequence[float]) -> float | None:
    return sorted(values)[(len(values) * 9 - 1) // 10] if values else None

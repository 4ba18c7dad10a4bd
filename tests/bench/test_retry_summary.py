"""Numbers from visits with chosen times.

Breaks when who gave up counts as served, or a wait is taken from another client's place in line.
"""

import pytest

from octavo.bench.open_loop import Visit
from octavo.bench.retry_summary import summarize_retries, waits_needed_s


def served(came_s: float, ended_s: float) -> Visit:
    return Visit(came_s=float(came_s), is_let_in=True, ended_s=float(ended_s))


def refused(came_s: float, promised_s: float, ended_s: float | None = None) -> Visit:
    return Visit(
        came_s=float(came_s),
        refused_s=float(came_s),
        promised_s=float(promised_s),
        is_let_in=ended_s is not None,
        ended_s=None if ended_s is None else float(ended_s),
    )


# Two places: the third must wait for the first end, the fourth for the second, and so on.
VISITS = [
    served(0, 10),
    served(1, 20),
    refused(2, 9, 30),
    refused(3, 12),  # never served
    refused(4, 50, 60),
]


def test_the_line_lets_in_by_arrival_as_places_become_free() -> None:
    assert waits_needed_s(VISITS, 2) == [8, 17, 16]


def test_nobody_had_to_wait_where_a_place_was_free() -> None:
    assert waits_needed_s(VISITS, 9) == [0, 0, 0]
    assert waits_needed_s([served(0, 1), served(0, 1), refused(5, 9, 20)], 2) == [0]


def test_shares_and_waits() -> None:
    summary = summarize_retries(VISITS, 2)
    assert (summary.sent, summary.refused, summary.let_in_at_retry) == (5, 3, 2)
    assert summary.share == pytest.approx(2 / 3)
    assert (summary.promised_p50_s, summary.promised_p90_s) == (12, 50)
    assert (summary.needed_p50_s, summary.needed_p90_s) == (16, 17)
    assert summary.served_per_s == 0, "none had ended when the last one came"


def test_without_refusals_there_is_no_share() -> None:
    summary = summarize_retries([served(0, 1), served(2, 3)], 2)
    assert (summary.refused, summary.share, summary.promised_p50_s) == (0, None, None)
    assert summary.served_per_s == 0.5

"""Numbers from traces with chosen times.

Breaks when a prompt or idle time slips into a number, or a merged delta counts as one token.
"""

import pytest

from octavo.bench.summary import (
    inter_token_latencies_s,
    summarize,
    times_to_first_token_s,
    tokens_per_s,
)

from .fakes import trace

FIRST = trace(10, (11, 1), (11.5, 1), (12, 1))
MERGED = trace(10.5, (13, 2), (14, 4))


def test_throughput_is_from_the_first_request_sent_to_the_last_token() -> None:
    """Whichever request they belong to, in whatever order the traces are."""
    assert tokens_per_s([FIRST]) == 3 / 2
    assert tokens_per_s([FIRST, MERGED]) == tokens_per_s([MERGED, FIRST]) == 9 / 4


def test_time_to_first_token_is_each_requests_own() -> None:
    assert times_to_first_token_s([FIRST, MERGED]) == [1, 2.5]


def test_tokens_that_come_together_share_the_wait() -> None:
    """The first delta's tokens have no token before them, however many they are."""
    assert inter_token_latencies_s([FIRST, MERGED]) == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]


def test_a_summary_is_medians() -> None:
    """Of rounds for throughput, of all requests and all tokens for latencies."""
    slow = [trace(0, (4, 1), (8, 1))]
    summary = summarize([[FIRST], [FIRST, MERGED], slow])
    assert summary.rounds_tokens_per_s == (1.5, 2.25, 0.25)
    assert summary.tokens_per_s == 1.5
    assert summary.ttft_ms == pytest.approx(1750)  # of 1, 1, 2.5 and 4 s
    assert summary.itl_ms == pytest.approx(500)  # of 4 x 0.5, 4 x 0.25 and 4 s


def test_no_latency_where_all_tokens_came_at_once() -> None:
    assert summarize([[trace(0, (1, 5))]]).itl_ms is None

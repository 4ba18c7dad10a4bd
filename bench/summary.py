"""From traces to numbers: throughput of a round, and medians over several."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .closed_loop import Trace


def tokens_per_s(traces: Sequence[Trace]) -> float:
    """Output tokens per second, end to end: from the first request sent to the last token."""
    num_tokens = sum(len(trace.token_ids) for trace in traces)
    start_s = min(trace.sent_s for trace in traces)
    end_s = max(trace.deltas[-1][0] for trace in traces)
    return num_tokens / (end_s - start_s)


def times_to_first_token_s(traces: Sequence[Trace]) -> list[float]:
    """Of each request, from when it was sent to its first delta with tokens."""
    return [trace.deltas[0][0] - trace.sent_s for trace in traces]


def inter_token_latencies_s(traces: Sequence[Trace]) -> list[float]:
    """Of each token but those of a request's first delta, its share of the wait for its delta.

    A server merges what its reader has not taken; n tokens that come together after a gap count as
    n times a gap of one n-th.
    """
    return [
        (now_s - before_s) / num_tokens
        for trace in traces
        for (before_s, _), (now_s, num_tokens) in zip(trace.deltas, trace.deltas[1:], strict=False)
        for _ in range(num_tokens)
    ]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Several rounds of one kind.

    Attributes:
      tokens_per_s: Median over the rounds of the output tokens per second, end to end.
      rounds_tokens_per_s: The same of each round, in order.
      ttft_ms: Median over all requests of the time to the first token.
      itl_ms: Median over all tokens of the time between tokens; None if each request's tokens came
        all at once.
    """

    tokens_per_s: float
    rounds_tokens_per_s: tuple[float, ...]
    ttft_ms: float
    itl_ms: float | None


def summarize(rounds: Sequence[Sequence[Trace]]) -> Summary:
    """What the rounds, at least one, come to."""
    speeds = tuple(tokens_per_s(traces) for traces in rounds)
    everything = [trace for traces in rounds for trace in traces]
    latencies_s = inter_token_latencies_s(everything)
    return Summary(
        tokens_per_s=statistics.median(speeds),
        rounds_tokens_per_s=speeds,
        ttft_ms=1e3 * statistics.median(times_to_first_token_s(everything)),
        itl_ms=1e3 * statistics.median(latencies_s) if latencies_s else None,
    )

"""The events of Generate, from what the engine brought. Pure.

The order of events, and their numbers, are server.reply's.
"""

import math
from collections.abc import Iterator, Sequence

from ..engine.request import FinishReason, Timings
from ..engine.sampling_params import LEAST_LOGPROB
from . import octavo_pb2 as pb
from .choice_output import ChoiceEnd, Piece
from .logprobs import Logprobs
from .request_stream import Failure, FailureKind, Outcome
from .served_model import StreamDecoder

ECHO_TOKENS_PER_EVENT = 1024
"""Decoding so many holds up no other stream for long."""

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
}

_FAILURE_CODES = {
    FailureKind.INTERNAL: pb.FAILURE_CODE_INTERNAL,
    FailureKind.GUIDE: pb.FAILURE_CODE_GUIDE,
    FailureKind.SHUTTING_DOWN: pb.FAILURE_CODE_SHUTTING_DOWN,
}


def echo_deltas(
    prompt_token_ids: Sequence[int], decoder: StreamDecoder
) -> Iterator[pb.PromptDelta]:
    """The prompt's ids and text, in parts.

    A character that the prompt leaves unfinished is not in it. If the output goes on with it, it
    comes there; else not at all, where the text of all ids has U+FFFD. But for that the two texts
    joined are the text of all ids.

    Args:
      prompt_token_ids: All of them.
      decoder: Makes text of the first token on.
    """
    for start in range(0, len(prompt_token_ids), ECHO_TOKENS_PER_EVENT):
        token_ids = prompt_token_ids[start : start + ECHO_TOKENS_PER_EVENT]
        yield pb.PromptDelta(token_ids=token_ids, text=decoder.push(token_ids).encode())


def prompt_delta(logprobs: Logprobs) -> pb.PromptDelta:
    """The next log-probabilities of the prompt."""
    delta = pb.PromptDelta()
    _add_logprobs(delta, logprobs)
    return delta


def token_event(piece: Piece) -> pb.GenerateEvent:
    """The next tokens of one choice, without usage. One is made for every token, so in place."""
    event = pb.GenerateEvent()
    delta = event.token_delta
    delta.index = piece.choice
    delta.token_ids.extend(piece.token_ids)
    delta.text = "".join(piece.texts).encode()
    if piece.logprobs is not None:
        _add_logprobs(delta, piece.logprobs)
    return event


def finished(choice: int, end: ChoiceEnd) -> pb.Finished:
    """The event that says why a choice ended; not for those that fail."""
    return pb.Finished(
        index=choice,
        reason=_FINISH_REASONS[end.reason],
        stop_token_id=end.stop_token_id,
        stop=end.stop,
    )


def completed(outcome: Outcome, usage: pb.Usage) -> pb.Completed:
    """The terminal event of a request that ended well."""
    return pb.Completed(
        usage=usage,
        timings=None if outcome.timings is None else _timings(outcome.timings),
        num_preemptions=outcome.num_preemptions,
    )


def failed(failure: Failure) -> pb.Failed:
    """The terminal event of a request that cannot be finished."""
    return pb.Failed(
        code=_FAILURE_CODES[failure.kind],
        message=failure.message,
        retryable=failure.kind is FailureKind.SHUTTING_DOWN,
    )


def finite(logprobs: Sequence[float]) -> Sequence[float]:
    """The same numbers, at least LEAST_LOGPROB; that too for NaN.

    The engine bounds its own. This is the last wall, for what a broken one would send.
    """
    if not logprobs or (all(map(math.isfinite, logprobs)) and min(logprobs) >= LEAST_LOGPROB):
        return logprobs
    return [
        LEAST_LOGPROB if math.isnan(number) else min(max(number, LEAST_LOGPROB), 0.0)
        for number in logprobs
    ]


def _add_logprobs(delta: pb.PromptDelta | pb.TokenDelta, logprobs: Logprobs) -> None:
    """Fills in those of all places, with a message for the most likely ids of each."""
    delta.logprobs.extend(finite(logprobs.values))
    num_top = len(logprobs.top_token_ids) // len(logprobs.values)
    if not num_top:
        return
    top_values = finite(logprobs.top_values)
    for start in range(0, len(top_values), num_top):
        tops = slice(start, start + num_top)
        delta.top_logprobs.add(token_ids=logprobs.top_token_ids[tops], logprobs=top_values[tops])


def _timings(timings: Timings) -> pb.Timings:
    def after_arrival_s(at_s: float | None) -> float | None:
        return None if at_s is None else at_s - timings.arrival_s

    return pb.Timings(
        queue_s=after_arrival_s(timings.admitted_s),
        ttft_s=after_arrival_s(timings.first_token_s),
        e2e_s=after_arrival_s(timings.finished_s),
    )

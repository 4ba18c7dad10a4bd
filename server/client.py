"""A small blocking client: sends one request, hands out text as it comes, returns the answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from . import octavo_pb2 as pb
from . import octavo_pb2_grpc

# The window of a stream belongs to its reader. A small one lets the server notice a slow reader
# and merge what it has not taken, instead of filling buffers.
_CHANNEL_OPTIONS = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "cancelled",
    pb.FINISH_REASON_DEADLINE: "deadline",
}


class GenerationFailed(Exception):
    """The server accepted the request and could not finish it."""


TopLogprobs = list[tuple[int, float]]
"""The most likely ids at one place with their log-probabilities, the most likely first."""


@dataclass(kw_only=True)
class Choice:
    """One output, so far or in all.

    Attributes:
      token_ids: Output ids.
      text: Their text.
      logprobs: Of token_ids, if asked for.
      top_logprobs: One for each of token_ids, if asked for.
      finish_reason: stop, length, cancelled or deadline; None while it is not complete.
      stop_token_id: The id that ended it, for stop.
      stop: The stop string that ended it, for stop.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    stop: str | None = None


@dataclass(kw_only=True)
class Answer:
    """What came back, so far or in all.

    Attributes:
      accepted: What the server said first: what it calls the request, and how long the prompt is.
      choices: The outputs, as many as were asked for.
      prompt_token_ids: Of the prompt, if it was asked back.
      prompt_text: Their text, likewise.
      prompt_logprobs: Of the prompt's tokens but the first, if asked for.
      prompt_top_logprobs: One for each of prompt_logprobs, if asked for.
      completed: Usage and timings; None while it is not complete.
    """

    accepted: pb.Accepted = field(default_factory=pb.Accepted)
    choices: list[Choice]
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_text: str = ""
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    completed: pb.Completed | None = None


def open_channel(address: str) -> grpc.Channel:
    """A plaintext channel to host:port; connects when it is used."""
    return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)


def generate(
    channel: grpc.Channel, request: pb.GenerateRequest, on_text: Callable[[str], None]
) -> Answer:
    """Runs one request to its end.

    Args:
      channel: To a server.
      request: What to ask.
      on_text: Gets each piece of text as it comes: of the prompt, if that is asked back, and of all
        choices as they take turns.

    Raises:
      grpc.RpcError: The server refused the request, or the connection broke.
      GenerationFailed: The server could not finish it.
      KeyboardInterrupt: The user interrupted; the request is cancelled.
    """
    call = octavo_pb2_grpc.InferenceStub(channel).Generate(request)
    answer = Answer(choices=[])
    try:
        for event in call:
            if not answer.choices:  # now that the server has accepted that there are so many
                num_choices = request.sampling.n if request.sampling.HasField("n") else 1
                answer.choices += [Choice() for _ in range(num_choices)]
            _take(event, answer, on_text)
    finally:
        call.cancel()  # without effect on a call that has ended
    if answer.completed is None:
        raise GenerationFailed("the stream ended without a terminal event")
    return answer


def retry_after_s(error: grpc.Call | grpc.aio.AioRpcError) -> float | None:
    """In how many seconds the server may let the same request in; None if it did not say.

    Args:
      error: What a call raised; a grpc.RpcError from a blocking call is a grpc.Call too.
    """
    # The error of grpc.aio has the same methods and another class.
    status = rpc_status.from_call(cast(grpc.Call, error))
    for detail in () if status is None else status.details:
        info = RetryInfo()
        if detail.Unpack(info):
            return info.retry_delay.ToTimedelta().total_seconds()
    return None


def _take(event: pb.GenerateEvent, answer: Answer, on_text: Callable[[str], None]) -> None:
    match event.WhichOneof("event"):
        case "accepted":
            answer.accepted = event.accepted
        case "prompt_delta":
            _take_prompt(event.prompt_delta, answer, on_text)
        case "token_delta":
            delta, choice = event.token_delta, answer.choices[event.token_delta.index]
            text = delta.text.decode()
            choice.token_ids.extend(delta.token_ids)
            choice.logprobs.extend(delta.logprobs)
            choice.top_logprobs.extend(map(_pairs, delta.top_logprobs))
            choice.text += text
            on_text(text)
        case "finished":
            finished, choice = event.finished, answer.choices[event.finished.index]
            choice.finish_reason = _REASONS[finished.reason]
            if finished.HasField("stop_token_id"):
                choice.stop_token_id = finished.stop_token_id
            if finished.HasField("stop"):
                choice.stop = finished.stop
        case "completed":
            answer.completed = event.completed
        case "failed":
            raise GenerationFailed(event.failed.message)
        case _:  # events that a newer server may add
            pass


def _take_prompt(delta: pb.PromptDelta, answer: Answer, on_text: Callable[[str], None]) -> None:
    answer.prompt_token_ids.extend(delta.token_ids)
    answer.prompt_logprobs.extend(delta.logprobs)
    answer.prompt_top_logprobs.extend(map(_pairs, delta.top_logprobs))
    if text := delta.text.decode():
        answer.prompt_text += text
        on_text(text)


def _pairs(top: pb.TopLogprobs) -> TopLogprobs:
    return list(zip(top.token_ids, top.logprobs, strict=True))

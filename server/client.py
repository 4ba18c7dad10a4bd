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


@dataclass(kw_only=True)
class Answer:
    """What came back, so far or in all.

    Attributes:
      request_id: What the server calls the request.
      token_ids: Output ids.
      text: Their text.
      logprobs: Of token_ids, if asked for.
      prompt_logprobs: Of the prompt's tokens but the first, if asked for.
      finish_reason: stop, length, cancelled or deadline; None while it is not complete.
      stop_token_id: The id that ended it, for stop.
      completed: Usage and timings; None while it is not complete.
    """

    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
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
      on_text: Gets each piece of text as it comes.

    Raises:
      grpc.RpcError: The server refused the request, or the connection broke.
      GenerationFailed: The server could not finish it.
      KeyboardInterrupt: The user interrupted; the request is cancelled.
    """
    call = octavo_pb2_grpc.InferenceStub(channel).Generate(request)
    answer = Answer()
    try:
        for event in call:
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
            answer.request_id = event.accepted.request_id
        case "prompt_logprobs":
            answer.prompt_logprobs.extend(event.prompt_logprobs.logprobs)
        case "token_delta":
            text = event.token_delta.text.decode()
            answer.token_ids.extend(event.token_delta.token_ids)
            answer.logprobs.extend(event.token_delta.logprobs)
            answer.text += text
            on_text(text)
        case "finished":
            answer.finish_reason = _REASONS[event.finished.reason]
            if event.finished.HasField("stop_token_id"):
                answer.stop_token_id = event.finished.stop_token_id
        case "completed":
            answer.completed = event.completed
        case "failed":
            raise GenerationFailed(event.failed.message)
        case _:  # events that a newer server may add
            pass

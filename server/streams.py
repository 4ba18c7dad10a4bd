"""From the engine thread to each client's stream: one wake-up per step, nothing lost, in order.

A client may read slower than the engine produces. What it has not taken is merged here (ids and
numbers in flat arrays, no text yet) and goes out as one longer delta when it reads again. So a
stalled client costs no more memory than its own output, and the engine never waits for it.
"""

import asyncio
import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from ..engine.request import RequestOutput
from .status import Refusal

MAX_TOKENS_PER_PIECE = 8192
"""Bounds one event: with log-probabilities and text well below the message limit of clients."""


class FailureKind(enum.Enum):
    """Why an accepted request cannot be finished."""

    INTERNAL = "internal"
    SHUTTING_DOWN = "shutting down"


@dataclass(frozen=True)
class Failure:
    """The end of a request that the server, not the engine, gave up."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a reader takes at once.

    Attributes:
      prompt_logprobs: The next prompt log-probabilities.
      token_ids: The next output ids.
      logprobs: One for each of token_ids if asked for, else empty.
      end: The engine's last output of this request, or what ended it instead; None: more follows.
    """

    prompt_logprobs: Sequence[float]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    end: RequestOutput | Failure | None


class RequestStream:
    """What one request produced and its reader has not taken. Used from the event loop alone.

    Attributes:
      is_submitted: The engine accepted the request; set by whoever submitted it.
      is_engine_done: The engine's last output came: it holds nothing of the request any more.
    """

    def __init__(self) -> None:
        """An empty stream."""
        self.is_submitted = False
        self.is_engine_done = False
        self._prompt_logprobs = array("f")
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._end: RequestOutput | Failure | None = None
        self._has_news = asyncio.Event()

    def push(self, output: RequestOutput) -> None:
        """Adds what a step brought; what comes after a failure is dropped."""
        if output.finish_reason is not None:
            self.is_engine_done = True
        if self._end is not None:
            return
        self._prompt_logprobs.extend(output.prompt_logprobs)
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        if output.finish_reason is not None:
            self._end = output
        self._has_news.set()

    def fail(self, failure: Failure) -> None:
        """Ends the stream after what is in it already, unless it has ended."""
        if self._end is None:
            self._end = failure
            self._has_news.set()

    async def take(self) -> Piece:
        """Waits for something and takes it, oldest first, MAX_TOKENS_PER_PIECE at most.

        Not to be called again after a piece with an end.
        """
        await self._has_news.wait()
        prompt_logprobs = _cut(self._prompt_logprobs)
        # Output comes after all of the prompt's log-probabilities.
        is_prompt_done = not self._prompt_logprobs
        token_ids = _cut(self._token_ids) if is_prompt_done else ()
        logprobs = _cut(self._logprobs) if is_prompt_done else ()
        is_all = is_prompt_done and not self._token_ids
        if is_all:
            self._has_news.clear()
        return Piece(
            prompt_logprobs=prompt_logprobs,
            token_ids=token_ids,
            logprobs=logprobs,
            end=self._end if is_all else None,
        )


def _cut[T: (int, float)](values: "array[T]") -> "array[T]":
    """Takes the oldest values out."""
    taken = values[:MAX_TOKENS_PER_PIECE]
    del values[:MAX_TOKENS_PER_PIECE]
    return taken


class StreamRouter:
    """The open streams by request id. All but `on_outputs` runs on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """A router without streams; `loop` is where they are read."""
        self._loop = loop
        self._streams: dict[str, RequestStream] = {}
        self._abandoned: set[str] = set()
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    def __len__(self) -> int:
        """Open streams, those included that only the engine has yet to let go."""
        return len(self._streams)

    def on_outputs(self, outputs: list[RequestOutput]) -> None:
        """Hands over what one step brought; called by the engine thread once per step."""
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def open(self, request_id: str) -> RequestStream:
        """Makes the stream of a new request; raises Refusal if the id is taken."""
        if request_id in self._streams:
            raise Refusal(
                grpc.StatusCode.ALREADY_EXISTS,
                "DUPLICATE_REQUEST_ID",
                f"a request with request_id {request_id!r} is live",
                field="request_id",
            )
        stream = self._streams[request_id] = RequestStream()
        self._all_closed.clear()
        return stream

    def close(self, request_id: str) -> bool:
        """The reader is gone. Returns whether the engine still holds the request.

        If it does, the id stays taken until the engine's last output came; else that would reach
        a new request with the same id.
        """
        stream = self._streams[request_id]
        if stream.is_submitted and not stream.is_engine_done:
            self._abandoned.add(request_id)
            return True
        self._forget(request_id)
        return False

    def is_running(self, request_id: str) -> bool:
        """Whether the engine holds a request with this id that somebody reads."""
        stream = self._streams.get(request_id)
        return (
            stream is not None
            and stream.is_submitted
            and not stream.is_engine_done
            and request_id not in self._abandoned
        )

    def num_running(self) -> int:
        """Requests for which `is_running` holds."""
        return sum(map(self.is_running, self._streams))

    def fail_all(self, failure: Failure) -> None:
        """Ends every stream."""
        for stream in self._streams.values():
            stream.fail(failure)

    async def wait_all_closed(self) -> None:
        """Returns when no request is left."""
        await self._all_closed.wait()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.push(output)
            if output.finish_reason is not None and output.request_id in self._abandoned:
                self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        self._abandoned.discard(request_id)
        if not self._streams:
            self._all_closed.set()

"""From the engine thread to each client's stream: one wake-up per step, nothing lost, in order."""

import asyncio
import logging

import grpc

from ..engine.request import RequestOutput
from .request_stream import Failure, FailureKind, RequestStream
from .status import Refusal

logger = logging.getLogger(__name__)

INTERNAL_FAILURE = Failure(FailureKind.INTERNAL, "the server made a mistake; its log has more")
"""What clients learn of a bug of ours."""


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
        stream.discard()
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
            try:
                stream.push(output)
            except Exception:  # one request's; those behind it in this step go on
                logger.exception("output of request %s cannot be read", output.request_id)
                stream.break_off(INTERNAL_FAILURE)
            if stream.is_engine_done and output.request_id in self._abandoned:
                self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        self._abandoned.discard(request_id)
        if not self._streams:
            self._all_closed.set()

"""Refusals: why a call ends with a status other than OK, in the form gRPC clients can act on."""

import datetime
from collections.abc import Mapping
from typing import NoReturn, Protocol, runtime_checkable

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

ERROR_DOMAIN = "octavo"

MAX_MESSAGE_CHARACTERS = 320
"""A status travels in HTTP/2 trailers, of which clients take 8 KiB. The message is in them three
times, percent-encoded once and base64-encoded twice: 23 bytes for a character beyond U+FFFF."""


@runtime_checkable
class CallContext[Response](Protocol):
    """What handlers use of grpc.aio's context, whose own class is private."""

    async def write(self, message: Response) -> None:
        """Sends one message; returns when the transport took it."""

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """Ends the call with this status, by raising."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline, None without one."""


class Refusal(Exception):
    """A call that is refused before anything ran for it.

    Attributes:
      code: The gRPC status code.
      reason: One word in capitals for programs, such as QUEUE_FULL.
      message: One sentence for people; what is too long for a status is cut out of its middle.
      field: Path of the request's field that is at fault, or None.
      metadata: More for programs, by name; "retry_after_s" is added where that is known.
      retry_after_s: In how many seconds the same request may be let in, or None if nobody knows.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        field: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """See the attributes."""
        self.message = _shortened(message)
        super().__init__(self.message)
        self.code = code
        self.reason = reason
        self.field = field
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        if retry_after_s is not None:  # for clients that cannot unpack RetryInfo
            self.metadata["retry_after_s"] = f"{retry_after_s:.3f}"

    def to_status(self) -> grpc.Status:
        """The status with its google.rpc details.

        Source: https://google.aip.dev/193 and google/rpc/error_details.proto.
        """
        status = Status(code=Code.Value(self.code.name), message=self.message)
        status.details.add().Pack(
            ErrorInfo(reason=self.reason, domain=ERROR_DOMAIN, metadata=self.metadata)
        )
        if self.retry_after_s is not None:
            delay = Duration()
            delay.FromTimedelta(datetime.timedelta(seconds=self.retry_after_s))
            status.details.add().Pack(RetryInfo(retry_delay=delay))
        if self.field is not None:
            violation = BadRequest.FieldViolation(field=self.field, description=self.message)
            status.details.add().Pack(BadRequest(field_violations=[violation]))
        return rpc_status.to_status(status)


def _shortened(message: str) -> str:
    """The beginning, which names the field, and the end, which names the bound.

    What lies between may be a client's and of any length.
    """
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    half = MAX_MESSAGE_CHARACTERS // 2 - 2
    return f"{message[:half]}...{message[-half:]}"


def invalid(field: str, message: str) -> Refusal:
    """The refusal of a request whose `field` can never be right."""
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", message, field=field)

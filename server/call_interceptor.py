"""Around every call of ours: what cannot be parsed or sent, or is refused, becomes a status.

So do our bugs.

Without it grpc would answer UNKNOWN with the text of whatever exception came up.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError, Message

from .status import CallContext, Refusal

logger = logging.getLogger(__name__)

MAX_SEND_BYTES = 4 << 20
"""What gRPC clients take in one message unless told otherwise."""

_OUR_METHODS = "/octavo.v1."


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Lets handlers raise Refusal to end a call by its status."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call; health and reflection keep theirs."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OUR_METHODS):
            return handler
        if handler.response_streaming:
            make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        else:
            make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary

        async def guarded(request: Message | DecodeError, context: CallContext[Any]) -> Any:
            return await _call(method, behaviour, request, context)

        return make(
            cast(Any, guarded),  # the type stubs know no handlers that are coroutines
            request_deserializer=_parser(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


async def _call(
    method: str,
    behaviour: Callable[[Message, CallContext[Any]], Awaitable[Any]],
    request: Message | DecodeError,
    context: CallContext[Any],
) -> Any:
    try:
        if isinstance(request, DecodeError):
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", str(request))
        response = await behaviour(request, context)
        if isinstance(response, Message) and response.ByteSize() > MAX_SEND_BYTES:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "RESPONSE_TOO_LARGE",
                f"the response has {response.ByteSize()} bytes; it must have at most "
                f"{MAX_SEND_BYTES}: ask for less at once",
            )
        return response
    except Refusal as refusal:
        status = refusal.to_status()
    except Exception:
        # The client learns that it is our fault, and the log what it was.
        logger.exception("%s failed", method)
        status = Refusal(
            grpc.StatusCode.INTERNAL, "INTERNAL", "the server made a mistake; its log has more"
        ).to_status()
    await context.abort_with_status(status)


def _parser(deserialize: Callable[[bytes], Message]) -> Callable[[bytes], Message | DecodeError]:
    """A deserializer that returns its error: raised in there, it would be beyond our reach."""

    def parse(data: bytes) -> Message | DecodeError:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return parse

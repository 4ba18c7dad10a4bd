"""octavo.v1.Control: information, load, abort, pause and drain, for operators and routers."""

from importlib.metadata import version

import grpc

from ..engine.request import FinishReason
from . import octavo_pb2 as pb
from .conversion import load_info, model_info
from .drain import Drain
from .lifecycle import Lifecycle, ServerState
from .status import CallContext, Refusal, invalid
from .streams import StreamRouter

_STATES = {
    ServerState.LOADING: pb.SERVER_STATE_LOADING,
    ServerState.READY: pb.SERVER_STATE_READY,
    ServerState.PAUSED: pb.SERVER_STATE_PAUSED,
    ServerState.DRAINING: pb.SERVER_STATE_DRAINING,
}

MAX_DRAIN_S = 86_400.0


class ControlService:
    """The handlers. They pass no gate: an overloaded server still says that it is."""

    def __init__(self, lifecycle: Lifecycle, router: StreamRouter, drain: Drain) -> None:
        """Shares its parts with the server."""
        self._lifecycle = lifecycle
        self._router = router
        self._drain = drain

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: CallContext[pb.GetServerInfoResponse]
    ) -> pb.GetServerInfoResponse:
        """Version and state; never refused."""
        return pb.GetServerInfoResponse(
            version=version("octavo"),
            state=_STATES[self._lifecycle.state],
            stage=self._lifecycle.stage,
        )

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: CallContext[pb.GetModelInfoResponse]
    ) -> pb.GetModelInfoResponse:
        """The served model's facts."""
        return model_info(self._lifecycle.loaded_model)

    async def GetLoad(
        self, request: pb.GetLoadRequest, context: CallContext[pb.GetLoadResponse]
    ) -> pb.GetLoadResponse:
        """How busy the engine is."""
        model = self._lifecycle.loaded_model
        return load_info(
            model.engine.load(),
            num_streams=len(self._router),
            compile_events_since_ready=model.compile_events_since_ready(),
            is_attention_fallback=bool(model.attention_reason),
        )

    async def Abort(
        self, request: pb.AbortRequest, context: CallContext[pb.AbortResponse]
    ) -> pb.AbortResponse:
        """Ends a request; asking twice is no error."""
        engine = self._lifecycle.loaded_model.engine
        is_found = self._router.is_running(request.request_id)
        if is_found:
            engine.abort(request.request_id, FinishReason.CANCELLED)
        return pb.AbortResponse(found=is_found)

    async def AbortAll(
        self, request: pb.AbortAllRequest, context: CallContext[pb.AbortAllResponse]
    ) -> pb.AbortAllResponse:
        """Ends every live request."""
        engine = self._lifecycle.loaded_model.engine
        num_running = self._router.num_running()
        engine.abort_all(FinishReason.CANCELLED)
        return pb.AbortAllResponse(num_aborted=num_running)

    async def Pause(
        self, request: pb.PauseRequest, context: CallContext[pb.PauseResponse]
    ) -> pb.PauseResponse:
        """Stops the engine from stepping."""
        await self._lifecycle.pause()
        return pb.PauseResponse()

    async def Resume(
        self, request: pb.ResumeRequest, context: CallContext[pb.ResumeResponse]
    ) -> pb.ResumeResponse:
        """Goes on after Pause."""
        await self._lifecycle.resume()
        return pb.ResumeResponse()

    async def Drain(
        self, request: pb.DrainRequest, context: CallContext[pb.DrainResponse]
    ) -> pb.DrainResponse:
        """Begins to shut down."""
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        if timeout_s is not None:
            if not 0 <= timeout_s <= MAX_DRAIN_S:  # NaN fails
                raise invalid(
                    "timeout_s", f"timeout_s is {timeout_s}; it must be in [0, {MAX_DRAIN_S:g}]"
                )
            if self._drain.begun.is_set():
                raise Refusal(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "DRAINING",
                    "a drain is under way and keeps its own time; leave timeout_s out",
                    field="timeout_s",
                )
        self._drain.begin(timeout_s=timeout_s)
        return pb.DrainResponse()

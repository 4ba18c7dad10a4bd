"""octavo.v1.Control: information, load and abort, for operators, gateways and routers."""

from importlib.metadata import version

from ..engine.request import FinishReason
from . import octavo_pb2 as pb
from .conversion import model_info
from .lifecycle import Lifecycle, ServerState
from .status import CallContext
from .streams import StreamRouter

_STATES = {
    ServerState.LOADING: pb.SERVER_STATE_LOADING,
    ServerState.READY: pb.SERVER_STATE_READY,
    ServerState.DRAINING: pb.SERVER_STATE_DRAINING,
}


class ControlService:
    """The handlers. They pass no gate: an overloaded server still says that it is."""

    def __init__(self, lifecycle: Lifecycle, router: StreamRouter) -> None:
        """Shares its parts with the server."""
        self._lifecycle = lifecycle
        self._router = router

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
        load = model.engine.load()
        return pb.GetLoadResponse(
            num_running=load.num_running,
            num_queued=load.num_queued,
            num_usable_pages=load.num_usable_pages,
            num_free_pages=load.num_free_pages,
            num_streams=len(self._router),
            steps_total=load.steps_total,
            preemptions_total=load.preemptions_total,
            prompt_tokens_total=load.prompt_tokens_total,
            output_tokens_total=load.output_tokens_total,
            compile_events_since_ready=model.compile_events_since_ready(),
            finished_total={reason.value: count for reason, count in load.finished_total.items()},
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

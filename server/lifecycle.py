"""Where a server is in its life: what requests and health checks are told.

Health services, by name: "" and octavo.v1.Inference say whether requests are taken; "liveness"
says whether the process is worth keeping, and is SERVING from the start unless the engine breaks.
"""

import enum

import grpc
from grpc_health.v1 import health, health_pb2

from .served_model import ServedModel
from .status import Refusal

INFERENCE_SERVICE = "octavo.v1.Inference"
CONTROL_SERVICE = "octavo.v1.Control"
LIVENESS = "liveness"

_READINESS = ("", INFERENCE_SERVICE)


class ServerState(enum.Enum):
    """The states, in the order in which they come; a server may be paused and ready in turn."""

    LOADING = "loading"
    READY = "ready"
    PAUSED = "paused"
    DRAINING = "draining"


class Lifecycle:
    """The state of one server. Used from the event loop alone, but for `stage`.

    Attributes:
      state: Where it is.
      stage: What it is doing while it loads; set by the thread that loads.
      health: The health service that tells.
    """

    def __init__(self) -> None:
        """A server that starts to load; call `begin` on the loop before it takes calls."""
        self.state = ServerState.LOADING
        self.stage = "starting"
        self.health = health.aio.HealthServicer()
        self._model: ServedModel | None = None
        self._is_sound = True
        self._is_closed = False

    async def begin(self) -> None:
        """Publishes that the process lives and is not ready."""
        await self._publish()

    async def set_ready(self, model: ServedModel) -> None:
        """From here on requests are taken, unless a drain has begun."""
        self._model = model
        self.stage = ""
        if self.state is ServerState.LOADING:
            self.state = ServerState.READY
            await self._publish()

    async def pause(self) -> None:
        """Stops the engine from stepping; requests are taken and wait.

        Raises:
          Refusal: UNAVAILABLE while loading; FAILED_PRECONDITION while draining, which would hang.
        """
        engine = self.loaded_model.engine
        if self.state is ServerState.DRAINING:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION, "DRAINING", "the server is shutting down"
            )
        engine.pause()
        self.state = ServerState.PAUSED
        await self._publish()

    async def resume(self) -> None:
        """Goes on after `pause`, if there was one; raises Refusal while loading."""
        engine = self.loaded_model.engine
        if self.state is ServerState.PAUSED:
            engine.resume()
            self.state = ServerState.READY
            await self._publish()

    async def set_draining(self) -> None:
        """Health says no from here on, and a paused engine goes on; there is no way back."""
        if self.state is ServerState.PAUSED:
            self.loaded_model.engine.resume()
        self.state = ServerState.DRAINING
        await self._publish()

    def close(self) -> None:
        """From here on new requests are refused; for a server that drains."""
        self._is_closed = True

    async def set_sound(self, is_sound: bool) -> None:
        """Whether the engine works; one that does not is neither ready nor alive."""
        if is_sound != self._is_sound:
            self._is_sound = is_sound
            await self._publish()

    @property
    def loaded_model(self) -> ServedModel:
        """The model, which may be draining; raises Refusal while it loads."""
        if self._model is None:
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE, "LOADING", f"the model is not loaded yet: {self.stage}"
            )
        return self._model

    def model_for(self, name: str) -> ServedModel:
        """The model that new requests for `name` run on; an empty name is whatever is served.

        Raises:
          Refusal: UNAVAILABLE while loading or once closed, NOT_FOUND for another name.
        """
        if self._is_closed:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server is shutting down")
        model = self.loaded_model
        if name not in ("", model.name):
            raise Refusal(
                grpc.StatusCode.NOT_FOUND,
                "UNKNOWN_MODEL",
                f"model is {name!r}; this server has {model.name!r}",
                field="model",
            )
        return model

    async def _publish(self) -> None:
        is_ready = self._is_sound and self.state is ServerState.READY
        services = {**dict.fromkeys(_READINESS, is_ready), LIVENESS: self._is_sound}
        response = health_pb2.HealthCheckResponse
        for service, is_serving in services.items():
            await self.health.set(service, response.SERVING if is_serving else response.NOT_SERVING)

"""The one way to drain a server, whoever asks: a signal, or Control.Drain.

At once health says NOT_SERVING and a paused engine goes on; for the withdrawal grace requests are
still taken, since load balancers go by what health said a moment ago; then new ones are refused;
then running ones have the drain's time; what is left ends with Failed.
"""

import asyncio
from collections.abc import Callable

from .lifecycle import Lifecycle, ServerState
from .request_stream import Failure, FailureKind
from .streams import StreamRouter

FLUSH_S = 5.0
"""How long the last events of requests that a drain gave up may take to reach their clients."""


class Drain:
    """The drain of one server. Used from the event loop alone.

    Attributes:
      begun: Set when it begins; there is no way back.
      ended: Set when no request is left.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        router: StreamRouter,
        *,
        timeout_s: float,
        grace_s: float,
        on_stage: Callable[[str], None],
    ) -> None:
        """One that has not begun.

        Args:
          lifecycle: Told how far it is.
          router: Whose streams it waits for.
          timeout_s: How long running requests may go on unless `begin` says otherwise.
          grace_s: How long new ones are taken unless `begin` says otherwise. It is waited for even
            when nothing runs: those that would come are not here yet.
          on_stage: Told what it is doing, for people.
        """
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self._lifecycle = lifecycle
        self._router = router
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._on_stage = on_stage
        self._tasks: set[asyncio.Task[None]] = set()  # at most one, kept from the collector

    def begin(self, *, timeout_s: float | None = None, grace_s: float | None = None) -> None:
        """Begins, and returns at once; one that is under way goes on as it began."""
        if self.begun.is_set():
            return
        self.begun.set()
        self._tasks.add(
            asyncio.create_task(
                self._run(
                    self._timeout_s if timeout_s is None else timeout_s,
                    self._grace_s if grace_s is None else grace_s,
                )
            )
        )

    async def give_up(self, why: str, flush_s: float) -> None:
        """Ends every running request with Failed; its clients have flush_s seconds to read that."""
        self._lifecycle.close()
        self._router.fail_all(Failure(FailureKind.SHUTTING_DOWN, why))
        try:
            async with asyncio.timeout(flush_s):
                await self._router.wait_all_closed()
        except TimeoutError:
            # Clients that do not read. Stopping cancels their handlers, which abort.
            pass

    async def _run(self, timeout_s: float, grace_s: float) -> None:
        takes_requests = self._lifecycle.state is not ServerState.LOADING
        await self._lifecycle.set_draining()
        if takes_requests and grace_s > 0:
            self._on_stage(
                f"taking requests for {grace_s:g} s more, so that load balancers can withdraw; "
                "a second signal stops at once"
            )
            await asyncio.sleep(grace_s)
        self._lifecycle.close()
        if len(self._router):
            self._on_stage(f"draining {len(self._router)} streams; a second signal stops at once")
        try:
            async with asyncio.timeout(timeout_s):
                await self._router.wait_all_closed()
        except TimeoutError:
            await self.give_up(
                f"the server shut down and the request had not ended {timeout_s:g} s later",
                FLUSH_S,
            )
        self.ended.set()

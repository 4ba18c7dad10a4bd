"""Guides are compiled before their requests are taken, in threads that do nothing else.

A guide may take a second to compile. In the threads that tokenise, a few of them would hold up
requests that have no guide at all.
"""

import asyncio
import reprlib
from concurrent.futures import ThreadPoolExecutor

import grpc

from ..engine.sampling_params import Guide, GuideKind
from .served_model import ServedModel
from .status import Refusal, invalid

NUM_THREADS = 2
"""One slow guide alone holds up nobody; and more would take the processors from the engine."""

TIMEOUT_S = 10.0
"""How long a guide may wait for a thread and compile, together."""


class GuideChecks:
    """Checks guides. Used from the event loop alone."""

    def __init__(self) -> None:
        """Starts no thread yet."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="guide-checks")

    async def check(self, guide: Guide, model: ServedModel) -> None:
        """Compiles a guide whose length was checked.

        One whose call ends while it waits for a thread is never compiled. One that is being
        compiled cannot be stopped: it keeps its thread, and is kept for the next request with it.

        Raises:
          Refusal: The engine takes no guides, cannot hold outputs to this one, or too many others
            are being compiled.
        """
        field = f"sampling.guide.{guide.kind.value}"
        if model.check_guide is None:
            raise invalid(field, f"{guide.kind.value} is a guide; this server takes none")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await loop.run_in_executor(self._threads, model.check_guide, guide)
        except ValueError as error:
            shown = "true" if guide.kind is GuideKind.JSON_OBJECT else reprlib.repr(guide.text)
            raise invalid(
                field,
                f"{guide.kind.value} is {shown}; it must be one that can be followed: {error}",
            ) from error
        except TimeoutError as error:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "GUIDES_BUSY",
                f"{guide.kind.value} was not compiled within {TIMEOUT_S:g} s; other guides "
                "may have been before it",
                retry_after_s=TIMEOUT_S,
            ) from error

    def close(self) -> None:
        """Takes no more guides; those that wait for a thread are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

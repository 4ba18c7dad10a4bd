"""GuidedMasks: which ids may come next in guided outputs, worked out beside the loop. No JAX.

A guide must see a token before it can say what may follow, and that takes time that depends on the
guide. So it happens on threads of its own while the device runs other rows; a guided request sits
out steps until its mask is there.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    Future,
    ThreadPoolExecutor,
    wait,
)
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from .request import FinishReason
from .sampling_params import Guide
from .schedule import RequestState
from .token_masks import Mask, without_ids

logger = logging.getLogger(__name__)


class GuideError(Exception):
    """A guide cannot be followed further; the message says why."""


@runtime_checkable
class GuideState(Protocol):
    """How far one guided output is."""

    def mask(self) -> Mask:
        """Ids that may come next; the model's end-of-sequence ids where it may end.

        Raises:
          GuideError: The guide cannot be followed further.
        """

    def take(self, token_id: int) -> None:
        """The output goes on with this id; raises GuideError if it must not."""


@runtime_checkable
class GuideCompiler(Protocol):
    """Makes guides of their descriptions."""

    def start(self, guide: Guide) -> GuideState:
        """The state of an output that has no token yet; raises ValueError for a bad guide."""


class GuidedMask(NamedTuple):
    """A request can go on.

    Attributes:
      state: Whose.
      mask: Ids that may come next.
    """

    state: RequestState
    mask: Mask


class GuidedEnd(NamedTuple):
    """The guide of a request has failed.

    Attributes:
      state: Whose.
      reason: Why it ends: GUIDE, or ERROR for a bug.
      error: The same in words.
    """

    state: RequestState
    reason: FinishReason
    error: str


class GuidedMasks:
    """The guides of live requests. Called by the engine's thread alone."""

    def __init__(self, compiler: GuideCompiler | None) -> None:
        """Starts idle; without a compiler every guide fails."""
        self._compiler = compiler
        # Guides begin on a thread of their own: a queue of them must not hold up those that run.
        self._beginners = ThreadPoolExecutor(1, thread_name_prefix="guides-begin")
        self._runners = ThreadPoolExecutor(1, thread_name_prefix="guides-run")
        self._guides: dict[RequestState, Future[GuideState]] = {}
        self._pending: dict[RequestState, Future[Mask]] = {}

    @property
    def has_pending(self) -> bool:
        """Whether a mask is being worked out."""
        return bool(self._pending)

    def begin(self, state: RequestState) -> None:
        """Begins with the mask of its first token."""
        guide = state.request.sampling.guide
        assert guide is not None
        begun = self._guides[state] = self._beginners.submit(self._start, guide)
        self._pending[state] = self._beginners.submit(_next_mask, begun, state, None, 0)

    def _start(self, guide: Guide) -> GuideState:
        if self._compiler is None:
            raise GuideError("this engine makes no guides")
        return self._compiler.start(guide)

    def take(self, state: RequestState, token_id: int) -> None:
        """A token came and the output goes on: begins with the mask of the next."""
        self._pending[state] = self._runners.submit(
            _next_mask, self._guides[state], state, token_id, len(state.output_token_ids)
        )

    def forget(self, state: RequestState) -> None:
        """It has ended; what is not begun for it never will be."""
        for futures in (self._guides, self._pending):
            future = futures.pop(state, None)
            if future is not None:
                future.cancel()

    def wait(self, timeout_s: float, *, for_all: bool = True, with_slot: bool = False) -> None:
        """Returns when all that is being worked out is, or one of it, or time is up.

        With with_slot it is only for those that have a slot: nobody else can run next.
        """
        pending = self._pending.items()
        futures = [future for state, future in pending if not with_slot or state.slot is not None]
        wait(futures, timeout_s, ALL_COMPLETED if for_all else FIRST_COMPLETED)

    def done(self) -> Iterable[GuidedMask | GuidedEnd]:
        """What has become known since the last call."""
        for state in [each for each, future in self._pending.items() if future.done()]:
            future = self._pending.pop(state)
            try:
                mask = future.result()
            except (GuideError, ValueError) as error:
                yield GuidedEnd(state, FinishReason.GUIDE, str(error))
            except Exception:  # a bug of ours or of a library ends one request, and not all
                logger.exception("the guide of %s failed", state.request.request_id)
                yield GuidedEnd(state, FinishReason.ERROR, "the guide failed")
            else:
                yield GuidedMask(state, mask)

    def close(self) -> None:
        """Ends the threads; what they are at may still run."""
        for pool in (self._beginners, self._runners):
            pool.shutdown(wait=False, cancel_futures=True)


def _next_mask(
    begun: Future[GuideState], state: RequestState, token_id: int | None, num_tokens: int
) -> Mask:
    """The mask after a token, less what the request rules out itself.

    Args:
      begun: Its guide, which is there: it was made before the first mask.
      state: Whose.
      token_id: The last token; None: there is none yet.
      num_tokens: Tokens that the output has.

    Raises:
      GuideError: The guide cannot be followed further, or the request leaves none of its ids.
    """
    guide, sampling = begun.result(), state.request.sampling
    if token_id is not None:
        guide.take(token_id)
    mask = guide.mask()
    if state.ids_mask is not None:
        mask = np.bitwise_and(mask, state.ids_mask)
    if num_tokens < sampling.min_tokens:
        # An end that is the only way on comes all the same.
        longer = without_ids(mask, state.stop_ids)
        mask = longer if longer.any() else mask
    if not mask.any():
        raise GuideError("the guide and the ids that may come have none in common")
    return mask

"""LLGuideState: how far one output is in a guide that llguidance compiled. No JAX."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
from llguidance import LLMatcher

from .guide_failures import panics_as, shortened
from .guided_masks import GuideError, GuideState
from .token_masks import Mask, has_id

_GOOD_ENDS = frozenset({"NoExtension", "NoExtensionBias", "EndOfSentence"})
_NOTHING_FOLLOWS = "no token of the vocabulary follows"


class LLGuideState(GuideState):
    """How far one output is. For one thread at a time."""

    def __init__(
        self, matcher: LLMatcher, *, ends: Mask, vocab_size: int, on_error: Callable[[], None]
    ) -> None:
        """At the beginning.

        Args:
          matcher: Its own.
          ends: The ids that end an output.
          vocab_size: Of the model.
          on_error: Called when the guide cannot be followed further.
        """
        self._matcher = matcher
        self._ends = ends
        self._vocab_size = vocab_size
        self._on_error = on_error
        self._has_ended = False
        self._error: str | None = None

    @property
    def is_finished(self) -> bool:
        """Nothing but an end may come, or it came."""
        return self._has_ended or self._matcher.stop_reason() in _GOOD_ENDS

    def mask(self) -> Mask:
        """Ids that may come next; where the output may end, all ids that end one are among them.

        Lets go of the GIL for most of its time.

        Raises:
          GuideError: The guide cannot be followed further, or could not be before.
        """
        with self._failures():
            if self.is_finished:
                return self._ends.copy()
            mask = np.zeros_like(self._ends)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._raise_if_stopped()
            # A grammar may name the ends itself, where the engine would take them for the end.
            mask &= ~self._ends
            if self.is_finished or self._matcher.is_accepting():
                mask |= self._ends
            if not mask.any():
                raise GuideError(_NOTHING_FOLLOWS)
            return mask

    def take(self, token_id: int) -> None:
        """The output goes on with this id, or ends with it.

        Raises:
          GuideError: It does not follow, or the guide could not be followed before.
        """
        with self._failures():
            if self._has_ended or not 0 <= token_id < self._vocab_size:
                follows = False
            elif has_id(self._ends, token_id):
                follows = self.is_finished or self._matcher.is_accepting()
                self._has_ended = follows
            else:
                follows = self._matcher.try_consume_tokens([token_id]) == 1
                self._raise_if_stopped()
            if not follows:
                raise GuideError(f"token {token_id} does not follow")

    def _raise_if_stopped(self) -> None:
        if self._matcher.is_error():
            error = shortened(self._matcher.get_error())
            raise GuideError(_NOTHING_FOLLOWS if error in _GOOD_ENDS else error)
        reason = self._matcher.stop_reason()
        if reason != "NotStopped" and reason not in _GOOD_ENDS:
            raise GuideError(f"llguidance stopped: {reason}")

    @contextmanager
    def _failures(self) -> Generator[None]:
        """The first error stays, and whoever compiled the guide hears of it."""
        if self._error is not None:
            raise GuideError(self._error)
        try:
            with panics_as(GuideError):
                yield
        except GuideError as error:
            self._error = str(error)
            self._on_error()
            raise

"""What one request brought and its reader has not taken: of all its choices, in a fair order.

A client may read slower than the engine produces. What it has not taken is merged here and goes out
as longer deltas when it reads again. So a stalled client costs no more memory than its own output,
and the engine never waits for it.
"""

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..engine.request import FinishReason, RequestOutput, Timings
from .choice_output import ChoiceOutput, Piece
from .logprobs import Logprobs, tokens_per_piece

Abort = Callable[[FinishReason, int | None], None]
"""Tells the engine to end one choice of the request, or with None all of them."""


class FailureKind(enum.Enum):
    """Why an accepted request cannot be finished."""

    INTERNAL = "internal"
    GUIDE = "guide"
    SHUTTING_DOWN = "shutting down"


FAILURE_KINDS = {
    FinishReason.ERROR: FailureKind.INTERNAL,
    FinishReason.GUIDE: FailureKind.GUIDE,
}
"""The ends of a choice that are the failure of its request."""


@dataclass(frozen=True)
class Failure:
    """The end of a request that cannot be finished."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a request of which all choices are complete; see RequestOutput.

    Attributes:
      num_cached_tokens: Of choice 0.
      num_preemptions: Of all choices.
      timings: Of choice 0, but for the end, which is that of the last choice.
    """

    num_cached_tokens: int = 0
    num_preemptions: int = 0
    timings: Timings | None = None


class RequestStream:
    """What one request produced and its reader has not taken. Used from the event loop alone.

    Attributes:
      is_submitted: The engine accepted the request.
      is_engine_done: The last outputs of all choices came: the engine holds nothing of it any more.
    """

    def __init__(self) -> None:
        """The stream of a request that the engine has not accepted."""
        self.is_submitted = False
        self.is_engine_done = False
        self._num_choices = 0
        self._last_outputs: dict[int, RequestOutput] = {}
        self._num_prompt_missing = 0
        self._prompt_pieces: deque[Logprobs] = deque()
        self._choices: list[ChoiceOutput] = []
        self._ready: deque[int] = deque()  # choices with news, each once
        self._abort: Abort = _abort_nothing
        self._failure: Failure | None = None
        self._is_settled = False  # ends without the engine's last outputs
        self._has_reader = True
        self._wake_up = asyncio.Event()

    def begin(
        self,
        num_choices: int,
        make_choice: Callable[[int], ChoiceOutput],
        abort: Abort,
        *,
        num_prompt_logprobs: int = 0,
    ) -> None:
        """The engine accepted the request; to be called before its first output can arrive.

        Args:
          num_choices: How many outputs it will bring.
          make_choice: Makes the one with this index.
          abort: Called when the engine may stop earlier than it knows itself.
          num_prompt_logprobs: How many the engine will bring. Output waits for them.
        """
        self.is_submitted = True  # first of all: from here on somebody has to let the engine know
        self._num_choices = num_choices
        self._abort = abort
        self._num_prompt_missing = num_prompt_logprobs
        self._choices = [make_choice(choice) for choice in range(num_choices)]

    @property
    def has_news(self) -> bool:
        """Whether `take` returns at once."""
        if self._ready and not self._waits_for_prompt:
            return True
        is_over = self.is_engine_done or self._failure is not None or self._is_settled
        return is_over or bool(self._prompt_pieces)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache, as soon as choice 0 has ended in the engine."""
        first = self._last_outputs.get(0)
        return 0 if first is None else first.num_cached_tokens

    def push(self, output: RequestOutput) -> None:
        """Adds what a step brought; what comes after a failure is dropped."""
        if output.finish_reason is not None:
            self._last_outputs[output.choice] = output
            self.is_engine_done = len(self._last_outputs) == self._num_choices
        if self._failure is not None or not self._has_reader:
            return
        if output.prompt_logprobs:
            self._add_prompt(output)
        choice = self._choices[output.choice]
        was_complete = choice.end is not None
        choice.push(output)
        if choice.end is not None and not was_complete:
            if choice.end.reason in FAILURE_KINDS:
                why = output.error or "the engine gave no reason"
                self._give_up(Failure(FAILURE_KINDS[choice.end.reason], why))
                self._abort_rest()
                return
            if output.finish_reason is None:
                self._abort(FinishReason.STOP, output.choice)
        self._note_news(output.choice)

    def fail(self, failure: Failure) -> None:
        """Ends the stream after what is in it already, unless all choices are complete."""
        if self._failure is not None:
            return
        if self._choices and all(choice.end is not None for choice in self._choices):
            self._is_settled = True  # by stop strings; only the engine's own numbers are missing
            self._wake_up.set()
            return
        self._give_up(failure)

    def break_off(self, failure: Failure) -> None:
        """As `fail`, after an exception: text that is held back is left where it is."""
        self._failure = self._failure or failure
        self._wake_up.set()
        self._abort_rest()

    def discard(self) -> None:
        """Nobody reads any more; what the engine still brings is dropped."""
        self._has_reader = False
        self._choices.clear()
        self._prompt_pieces.clear()
        self._ready.clear()

    async def take(self) -> Logprobs | Piece | Outcome | Failure:
        """Waits for something and takes it: first the prompt's log-probabilities, then the output.

        Choices take turns. An Outcome or a Failure is the last; this is not called again after it.
        """
        await self._wake_up.wait()
        news = self._next()
        if not self.has_news:
            self._wake_up.clear()
        return news

    def _next(self) -> Logprobs | Piece | Outcome | Failure:
        if self._prompt_pieces:
            return self._prompt_pieces.popleft()
        if self._ready:
            index = self._ready.popleft()
            choice = self._choices[index]
            piece = choice.take()
            if choice.has_news:
                self._ready.append(index)  # behind all others
            return piece
        return self._failure or _outcome(self._last_outputs)

    @property
    def _waits_for_prompt(self) -> bool:
        """Whether output has to wait because more is to come of the prompt, with choice 0."""
        return self._num_prompt_missing > 0 and 0 not in self._last_outputs

    def _add_prompt(self, output: RequestOutput) -> None:
        values, pieces = output.prompt_logprobs, self._prompt_pieces
        num_places, num_top = len(values), len(output.prompt_top_token_ids) // len(values)
        most = tokens_per_piece(num_top)
        for start in range(0, num_places, most):
            end = min(start + most, num_places)
            if not pieces or len(pieces[-1].values) + end - start > most:
                pieces.append(Logprobs())
            pieces[-1].extend(
                values, output.prompt_top_token_ids, output.prompt_top_logprobs, slice(start, end)
            )
        self._num_prompt_missing -= num_places

    def _give_up(self, failure: Failure) -> None:
        """Sets the failure, behind the text that choices held back."""
        self._failure = failure
        for choice in self._choices:
            if choice.end is None:
                choice.flush()
        for index in range(len(self._choices)):
            self._note_news(index)
        self._wake_up.set()

    def _abort_rest(self) -> None:
        if not self.is_engine_done:
            self._abort(FinishReason.CANCELLED, None)

    def _note_news(self, index: int) -> None:
        """Puts a choice that has something new behind those that wait to be read."""
        if self._choices[index].has_news and index not in self._ready:
            self._ready.append(index)
        if self.has_news:
            self._wake_up.set()


def _outcome(last_outputs: Mapping[int, RequestOutput]) -> Outcome:
    """What the last outputs of all choices say of the request, as far as they came."""
    first = last_outputs.get(0)
    if first is None:
        return Outcome()
    timings = first.timings
    if timings is not None:
        ends_s = [each.timings.finished_s for each in last_outputs.values() if each.timings]
        timings = replace(timings, finished_s=max(ends_s))
    return Outcome(
        num_cached_tokens=first.num_cached_tokens,
        num_preemptions=sum(each.num_preemptions for each in last_outputs.values()),
        timings=timings,
    )


def _abort_nothing(reason: FinishReason, choice: int | None) -> None:
    """Before `begin` the engine knows nothing of the request."""

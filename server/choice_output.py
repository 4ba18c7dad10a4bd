"""One choice on its way from the engine to its reader: text made, stop strings found, parts merged.

All that happens when the engine's output arrives, not when the client reads: a stop string that a
slow reader has yet to see must not let the engine run on.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ..engine.request import FinishReason, RequestOutput
from ..models.stop_strings import StopMatcher
from .logprobs import Logprobs, tokens_per_piece
from .served_model import StreamDecoder


@dataclass(frozen=True, kw_only=True)
class ChoiceEnd:
    """Why a choice is complete, as its client sees it.

    Attributes:
      reason: The kind of end.
      stop_token_id: The id that ended it, or None.
      stop: The stop string that ended it, or None.
    """

    reason: FinishReason
    stop_token_id: int | None = None
    stop: str | None = None


@dataclass(kw_only=True, slots=True)
class Piece:
    """What a reader takes at once, of one choice. It grows until it is taken.

    Attributes:
      choice: Whose.
      token_ids: The next output ids.
      logprobs: Of each of token_ids if asked for, else None.
      texts: The next text, in parts.
      end: Set in the choice's last piece, unless the request failed.
    """

    choice: int
    token_ids: "array[int]" = field(default_factory=partial(array, "i"))
    logprobs: Logprobs | None = None
    texts: list[str] = field(default_factory=list)
    end: ChoiceEnd | None = None


class ChoiceOutput:
    """What one choice produced and its reader has not taken.

    The earliest end counts. If a stop string and another end fall on one token, the stop string
    does, for the text ends inside that token. The token that completes it is the last one: it is
    sent and counted, and all that the engine brings after it is dropped.

    Attributes:
      num_tokens: Output tokens so far, taken or not.
      end: Why it is complete; None while it is not.
    """

    def __init__(
        self,
        choice: int,
        decoder: StreamDecoder,
        matcher: StopMatcher | None = None,
        *,
        min_tokens: int = 0,
        num_top: int = 0,
    ) -> None:
        """An output that has not begun.

        Args:
          choice: Which one it is.
          decoder: Makes its text.
          matcher: Looks for stop strings; None without any.
          min_tokens: A stop string counts only if a token after so many completes it.
          num_top: How many most likely ids come with each token.
        """
        self.num_tokens = 0
        self.end: ChoiceEnd | None = None
        self._choice = choice
        self._decoder = decoder
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._max_tokens_per_piece = tokens_per_piece(num_top)
        self._pieces: deque[Piece] = deque()

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._pieces)

    def push(self, output: RequestOutput) -> None:
        """Adds what a step brought; what comes after the end is dropped."""
        num_tokens, most = len(output.token_ids), self._max_tokens_per_piece
        for start in range(0, num_tokens, most):
            if self.end is not None:
                return
            self._add(output, start, min(start + most, num_tokens))
        if output.finish_reason is not None and self.end is None:
            self.flush()
            if self.end is None:
                self._finish(
                    ChoiceEnd(reason=output.finish_reason, stop_token_id=output.stop_token_id)
                )

    def flush(self) -> None:
        """Lets the text go that was held back, when there are no more tokens.

        A character that stays unfinished becomes U+FFFD here, which may complete a stop string:
        then that is the end.
        """
        self._add_text(self._decoder.flush())
        if self._matcher is not None and (held := self._matcher.flush()):
            self._piece(0).texts.append(held)

    def take(self) -> Piece:
        """The oldest piece; only if `has_news`."""
        return self._pieces.popleft()

    def _add(self, output: RequestOutput, start: int, end: int) -> None:
        """Adds tokens [start, end) of an output, or those up to a stop string."""
        piece = self._piece(end - start)
        token_ids = output.token_ids[start:end]
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            piece.texts.append(self._decoder.push(token_ids))
        else:
            end = start + self._match(token_ids)
            token_ids = output.token_ids[start:end]
        piece.token_ids.extend(token_ids)
        if output.logprobs:
            if piece.logprobs is None:
                piece.logprobs = Logprobs()
            piece.logprobs.extend(
                output.logprobs, output.top_token_ids, output.top_logprobs, slice(start, end)
            )

    def _match(self, token_ids: Sequence[int]) -> int:
        """Adds the text of tokens one by one until a stop string is found; returns of how many."""
        for number, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            self._add_text(self._decoder.push((token_id,)))
            if self.end is not None:
                return number
        return len(token_ids)

    def _add_text(self, text: str) -> None:
        """Adds the text that the last of num_tokens completed, as far as it may leave."""
        matcher = self._matcher
        if matcher is not None:
            text = matcher.push(text, counts=self.num_tokens > self._min_tokens)
        if text:
            self._piece(0).texts.append(text)
        if matcher is not None and matcher.matched is not None:
            self._finish(ChoiceEnd(reason=FinishReason.STOP, stop=matcher.matched))

    def _finish(self, end: ChoiceEnd) -> None:
        self.end = end
        self._piece(0).end = end

    def _piece(self, num_tokens: int) -> Piece:
        """The newest piece, if it has room for so many more tokens, or else a new one."""
        pieces = self._pieces
        if not pieces or len(pieces[-1].token_ids) + num_tokens > self._max_tokens_per_piece:
            pieces.append(Piece(choice=self._choice))
        return pieces[-1]

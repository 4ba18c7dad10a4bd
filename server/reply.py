"""Writes the events of one accepted request, at the pace at which its client reads."""

import logging
from collections.abc import Iterable

from . import octavo_pb2 as pb
from .choice_output import Piece
from .events import completed, failed, finished, prompt_delta, token_event
from .logprobs import Logprobs
from .request_stream import FAILURE_KINDS, Failure, Outcome, RequestStream
from .status import CallContext
from .streams import INTERNAL_FAILURE

logger = logging.getLogger(__name__)


class Reply:
    """From Accepted to the one terminal event."""

    def __init__(
        self,
        context: CallContext[pb.GenerateEvent],
        stream: RequestStream,
        accepted: pb.Accepted,
        *,
        echo: Iterable[pb.PromptDelta] = (),
        continuous_usage: bool = False,
    ) -> None:
        """A reply of which nothing is sent yet.

        Args:
          context: Where events go.
          stream: What it will say.
          accepted: The first event.
          echo: What follows it.
          continuous_usage: Every TokenDelta says the usage so far.
        """
        self._context = context
        self._stream = stream
        self._accepted = accepted
        self._echo = echo
        self._continuous_usage = continuous_usage
        self._num_completion_tokens = 0
        self._next_seq = 0

    async def send(self) -> None:
        """Sends all events; returns after the terminal one, which a bug of ours is too."""
        try:
            await self._send_all()
        except Exception:
            logger.exception("the reply to request %s failed", self._accepted.request_id)
            await self._write(pb.GenerateEvent(failed=failed(INTERNAL_FAILURE)))

    async def _send_all(self) -> None:
        await self._write(pb.GenerateEvent(accepted=self._accepted))
        for delta in self._echo:
            await self._write(pb.GenerateEvent(prompt_delta=delta))
        while True:
            match await self._stream.take():
                case Piece() as piece:
                    await self._send_piece(piece)
                case Logprobs() as logprobs:
                    await self._write(pb.GenerateEvent(prompt_delta=prompt_delta(logprobs)))
                case Outcome() as outcome:
                    end = completed(outcome, self._usage(outcome.num_cached_tokens))
                    await self._write(pb.GenerateEvent(completed=end))
                    return
                case Failure() as failure:
                    await self._write(pb.GenerateEvent(failed=failed(failure)))
                    return

    async def _send_piece(self, piece: Piece) -> None:
        self._num_completion_tokens += len(piece.token_ids)
        if piece.token_ids or piece.texts:
            event = token_event(piece)
            if self._continuous_usage:
                event.token_delta.usage.CopyFrom(self._usage(self._stream.num_cached_tokens))
            await self._write(event)
        # An error is said once for the request, by Failed.
        if piece.end is not None and piece.end.reason not in FAILURE_KINDS:
            event = pb.GenerateEvent(finished=finished(piece.choice, piece.end))
            await self._write(event)

    def _usage(self, num_cached_tokens: int) -> pb.Usage:
        """Of what was sent so far: every token is sent."""
        return pb.Usage(
            prompt_tokens=self._accepted.prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            cached_tokens=num_cached_tokens,
        )

    async def _write(self, event: pb.GenerateEvent) -> None:
        event.seq = self._next_seq
        self._next_seq += 1
        await self._context.write(event)

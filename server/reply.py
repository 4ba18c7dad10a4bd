"""Writes the events of one accepted request, at the pace at which its client reads."""

import logging

from ..engine.request import FinishReason, Place, RequestOutput
from . import octavo_pb2 as pb
from .conversion import completed, failed, finished
from .served_model import StreamDecoder
from .status import CallContext
from .streams import Failure, FailureKind, Piece, RequestStream

logger = logging.getLogger(__name__)


class Reply:
    """From Accepted to the one terminal event. The detokenizer runs here, not in the engine."""

    def __init__(
        self,
        context: CallContext[pb.GenerateEvent],
        stream: RequestStream,
        decoder: StreamDecoder,
        *,
        request_id: str,
        num_prompt_tokens: int,
        place: Place,
    ) -> None:
        """A reply of which nothing is sent yet; `stream` brings what it will say."""
        self._context = context
        self._stream = stream
        self._decoder = decoder
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._place = place
        self._num_completion_tokens = 0
        self._next_seq = 0

    async def send(self) -> None:
        """Sends all events; returns after the terminal one, which a bug of ours is too."""
        try:
            await self._send_all()
        except Exception:
            logger.exception("the reply to request %s failed", self._request_id)
            failure = Failure(FailureKind.INTERNAL, "the server made a mistake; its log has more")
            await self._write(pb.GenerateEvent(failed=failed(failure)))

    async def _send_all(self) -> None:
        await self._write(
            pb.GenerateEvent(
                accepted=pb.Accepted(
                    request_id=self._request_id,
                    prompt_tokens=self._num_prompt_tokens,
                    num_queued=self._place.num_queued,
                    predicted_wait_s=self._place.predicted_wait_s,
                )
            )
        )
        while True:
            piece = await self._stream.take()
            if piece.prompt_logprobs:
                await self._write(
                    pb.GenerateEvent(
                        prompt_logprobs=pb.PromptLogprobs(logprobs=piece.prompt_logprobs)
                    )
                )
            await self._send_tokens(piece)
            if piece.end is not None:
                await self._send_end(piece.end)
                return

    async def _send_tokens(self, piece: Piece) -> None:
        self._num_completion_tokens += len(piece.token_ids)
        text = self._decoder.push(piece.token_ids) if piece.token_ids else ""
        if piece.end is not None:
            text += self._decoder.flush()
        if piece.token_ids or text:
            await self._write(
                pb.GenerateEvent(
                    token_delta=pb.TokenDelta(
                        token_ids=piece.token_ids, text=text.encode(), logprobs=piece.logprobs
                    )
                )
            )

    async def _send_end(self, end: RequestOutput | Failure) -> None:
        if isinstance(end, RequestOutput) and end.finish_reason is FinishReason.ERROR:
            end = Failure(FailureKind.INTERNAL, end.error or "the engine gave no reason")
        if isinstance(end, Failure):
            await self._write(pb.GenerateEvent(failed=failed(end)))
            return
        await self._write(pb.GenerateEvent(finished=finished(end)))
        await self._write(
            pb.GenerateEvent(
                completed=completed(
                    end,
                    num_prompt_tokens=self._num_prompt_tokens,
                    num_completion_tokens=self._num_completion_tokens,
                )
            )
        )

    async def _write(self, event: pb.GenerateEvent) -> None:
        event.seq = self._next_seq
        self._next_seq += 1
        await self._context.write(event)

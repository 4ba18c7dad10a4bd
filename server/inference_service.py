"""octavo.v1.Inference: accepts or refuses requests, and answers for the tokenizer."""

import asyncio
from collections.abc import Callable

import grpc

from ..engine.refusals import EngineUnavailable, InvalidRequest, Overloaded
from ..engine.request import FinishReason, Place, Request
from . import octavo_pb2 as pb
from .concurrency import ConcurrencyGate
from .conversion import invalid_field, overload
from .guide_checks import GuideChecks
from .lifecycle import Lifecycle
from .prepared_request import prepare, skips_special_tokens
from .prompts import MAX_DETOKENIZE_IDS, prompt_token_ids
from .reply import Reply
from .served_model import ServedModel
from .status import CallContext, Refusal, invalid
from .streams import StreamRouter
from .unknown_fields import refuse_unknown_fields


class InferenceService:
    """The handlers; all run on the event loop, which none of them blocks."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        router: StreamRouter,
        gate: ConcurrencyGate,
        guide_checks: GuideChecks,
        *,
        clock: Callable[[], float],
        new_request_id: Callable[[], str],
    ) -> None:
        """Shares its parts with the server.

        Args:
          lifecycle: Says which model takes requests, if any does.
          router: Where the engine's outputs arrive.
          gate: Bounds the calls of this service.
          guide_checks: Compile guides.
          clock: Seconds; the engine's monotonic clock.
          new_request_id: Names requests whose client gave no id.
        """
        self._lifecycle = lifecycle
        self._router = router
        self._gate = gate
        self._guide_checks = guide_checks
        self._clock = clock
        self._new_request_id = new_request_id

    async def Generate(
        self, request: pb.GenerateRequest, context: CallContext[pb.GenerateEvent]
    ) -> None:
        """Refuses by status before anything ran, or accepts and streams to the terminal event."""
        arrival_s = self._clock()
        with self._gate.enter():
            model = self._lifecycle.model_for(request.model)
            refuse_unknown_fields(request)
            deadline_s = _deadline_s(context, arrival_s)
            request_id = request.request_id or self._new_request_id()
            stream = self._router.open(request_id)
            try:
                prepared = await prepare(
                    request,
                    model,
                    self._guide_checks,
                    request_id=request_id,
                    arrival_s=arrival_s,
                    deadline_s=deadline_s,
                )
                place = _submit(model, prepared.request, request)
                stream.begin(
                    prepared.request.sampling.n,
                    prepared.choice_output,
                    lambda reason, choice: model.engine.abort(request_id, reason, choice),
                    num_prompt_logprobs=prepared.num_prompt_logprobs,
                )
                reply = Reply(
                    context,
                    stream,
                    prepared.accepted(place),
                    echo=prepared.echo(),
                    continuous_usage=request.response.continuous_usage,
                )
                await reply.send()
            finally:
                # A client that went away ends up here by CancelledError, which goes on up:
                # swallowed, it leaks memory in grpc (https://github.com/grpc/grpc/issues/43360).
                if self._router.close(request_id):
                    is_late = deadline_s is not None and self._clock() >= deadline_s
                    reason = FinishReason.DEADLINE if is_late else FinishReason.CANCELLED
                    model.engine.abort(request_id, reason)

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: CallContext[pb.TokenizeResponse]
    ) -> pb.TokenizeResponse:
        """The ids that Generate would run for the same input."""
        with self._gate.enter():
            model = self._lifecycle.model_for(request.model)
            refuse_unknown_fields(request)
            return pb.TokenizeResponse(token_ids=await prompt_token_ids(request, model))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: CallContext[pb.DetokenizeResponse]
    ) -> pb.DetokenizeResponse:
        """The text of ids."""
        with self._gate.enter():
            model = self._lifecycle.model_for(request.model)
            refuse_unknown_fields(request)
            num_ids = len(request.token_ids.ids)
            if num_ids > MAX_DETOKENIZE_IDS:
                raise invalid(
                    "token_ids",
                    f"token_ids has {num_ids} ids; it must have at most {MAX_DETOKENIZE_IDS}",
                )
            skip_special_tokens = skips_special_tokens(request)
            text = await asyncio.to_thread(_decode, model, request.token_ids, skip_special_tokens)
            return pb.DetokenizeResponse(text=text)


def _deadline_s(context: CallContext[pb.GenerateEvent], now_s: float) -> float | None:
    """The call's deadline on the engine's clock; raises Refusal if it has passed."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return None
    if remaining_s <= 0:
        raise Refusal(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "DEADLINE_PASSED",
            "the deadline had passed when the request arrived",
        )
    return now_s + remaining_s


def _submit(model: ServedModel, accepted: Request, request: pb.GenerateRequest) -> Place:
    """Hands the request to the engine; its refusals become ours."""
    try:
        return model.engine.submit(accepted)
    except InvalidRequest as error:
        raise invalid_field(error, request) from error
    except Overloaded as error:
        raise overload(error) from error
    except EngineUnavailable as error:
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPED", str(error)) from error


def _decode(model: ServedModel, token_ids: pb.TokenIds, skip_special_tokens: bool) -> str:
    """The text of ids that are all in the vocabulary; raises Refusal for any other."""
    for token_id in token_ids.ids:
        if not 0 <= token_id < model.vocab_size:
            raise invalid(
                "token_ids", f"token_ids has {token_id}; ids must be in [0, {model.vocab_size})"
            )
    return model.codec.decode(token_ids.ids, skip_special_tokens=skip_special_tokens)

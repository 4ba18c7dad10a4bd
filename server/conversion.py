"""Between the wire (octavo_pb2) and the engine's records. Pure; checks nothing but presence.

Bounds are engine.admission's, the same for every front end; `field_path` says where on the wire
the field that it names lies.
"""

from ..engine.request import FinishReason, RequestOutput, SamplingParams, Timings
from . import octavo_pb2 as pb
from .served_model import ServedModel
from .streams import Failure, FailureKind

_FIELD_PATHS = {
    **{name: f"sampling.{name}" for name in pb.Sampling.DESCRIPTOR.fields_by_name},
    "logprobs": "response.logprobs",
    "prompt_logprobs": "response.prompt_logprobs",
}

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
}

_FAILURE_CODES = {
    FailureKind.INTERNAL: pb.FAILURE_CODE_INTERNAL,
    FailureKind.SHUTTING_DOWN: pb.FAILURE_CODE_SHUTTING_DOWN,
}


def sampling_params(sampling: pb.Sampling, response: pb.ResponseOptions) -> SamplingParams:
    """The engine's parameters; what is absent on the wire keeps the engine's default."""
    defaults = SamplingParams()
    return SamplingParams(
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        temperature=(
            sampling.temperature if sampling.HasField("temperature") else defaults.temperature
        ),
        top_k=sampling.top_k if sampling.HasField("top_k") else defaults.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else defaults.top_p,
        min_p=sampling.min_p if sampling.HasField("min_p") else defaults.min_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=response.logprobs,
        prompt_logprobs=response.prompt_logprobs,
    )


def field_path(engine_field: str, request: pb.GenerateRequest) -> str:
    """Where in the request the field lies that the engine calls `engine_field`."""
    if engine_field == "prompt_token_ids":
        return request.WhichOneof("input") or "input"
    return _FIELD_PATHS.get(engine_field, engine_field)


def finished(output: RequestOutput) -> pb.Finished:
    """The event that says why the output ended; not for FinishReason.ERROR.

    Raises:
      ValueError: It is not the last output of its request.
    """
    if output.finish_reason is None:
        raise ValueError(f"finish_reason is None in the last output of {output.request_id}")
    return pb.Finished(
        reason=_FINISH_REASONS[output.finish_reason], stop_token_id=output.stop_token_id
    )


def completed(
    output: RequestOutput, *, num_prompt_tokens: int, num_completion_tokens: int
) -> pb.Completed:
    """The terminal event of a request that ended well."""
    return pb.Completed(
        usage=pb.Usage(prompt_tokens=num_prompt_tokens, completion_tokens=num_completion_tokens),
        timings=None if output.timings is None else _timings(output.timings),
        num_preemptions=output.num_preemptions,
    )


def failed(failure: Failure) -> pb.Failed:
    """The terminal event of a request that cannot be finished."""
    return pb.Failed(
        code=_FAILURE_CODES[failure.kind],
        message=failure.message,
        retryable=failure.kind is FailureKind.SHUTTING_DOWN,
    )


def model_info(model: ServedModel) -> pb.GetModelInfoResponse:
    """The facts that clients may know."""
    return pb.GetModelInfoResponse(
        name=model.name,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        has_chat_template=model.codec.has_chat_template,
        dtype=model.dtype,
        device=model.device,
        max_num_seqs=model.max_num_seqs,
        num_pages=model.num_pages,
        page_size=model.page_size,
        num_executables=model.num_executables,
    )


def _timings(timings: Timings) -> pb.Timings:
    arrival_s, admitted_s, first_token_s = (
        timings.arrival_s,
        timings.admitted_s,
        timings.first_token_s,
    )
    return pb.Timings(
        queue_s=None if admitted_s is None else admitted_s - arrival_s,
        ttft_s=None if first_token_s is None else first_token_s - arrival_s,
        e2e_s=timings.finished_s - arrival_s,
    )

"""Between the wire (octavo_pb2) and the engine's records. Pure; checks nothing but presence.

Bounds are engine.admission's, the same for every front end; `invalid_field` says where on the wire
the field that it names lies.
"""

import grpc

from ..engine.refusals import InvalidRequest, Overloaded
from ..engine.request import FinishReason, Load, Request, RequestOutput, Timings
from ..engine.sampling_params import SamplingParams
from . import octavo_pb2 as pb
from .served_model import ServedModel
from .status import Refusal, invalid
from .streams import Failure, FailureKind

# Seconds in the engine, milliseconds on the wire.
_TARGETS = {
    "ttft_target_s": "ttft_target_ms",
    "tpot_target_s": "tpot_target_ms",
    "queue_ttl_s": "queue_ttl_ms",
}

_FIELD_PATHS = {
    **{name: f"sampling.{name}" for name in pb.Sampling.DESCRIPTOR.fields_by_name},
    "logprobs": "response.logprobs",
    "prompt_logprobs": "response.prompt_logprobs",
    "priority": "scheduling.priority",
    "request_class": "scheduling.request_class",
    **{engine_name: f"scheduling.{name}" for engine_name, name in _TARGETS.items()},
    "cache_salt": "kv.cache_salt",
    "reads_prefix_cache": "kv.bypass_prefix_cache",
}

# By the bound's name in SchedulingConfig.
_OVERLOAD_REASONS = {
    "max_num_queued": "QUEUE_FULL",
    "max_queued_tokens": "TOKENS_QUEUED",
    "max_predicted_wait_s": "PREDICTED_WAIT",
    "max_tenant_queued": "TENANT_QUEUE_FULL",
    "max_tenant_tokens": "TENANT_TOKENS",
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


def engine_request(
    request: pb.GenerateRequest,
    *,
    request_id: str,
    prompt_token_ids: tuple[int, ...],
    arrival_s: float,
    deadline_s: float | None,
) -> Request:
    """What the engine gets of a request whose input is tokenised.

    Args:
      request: As it was sent.
      request_id: Its id, which may be one that the server made up.
      prompt_token_ids: Its input.
      arrival_s: When it came, on the engine's clock.
      deadline_s: The deadline of its call, on the same clock.
    """
    scheduling = request.scheduling
    targets = {
        engine_name: getattr(scheduling, name) / 1000 if scheduling.HasField(name) else None
        for engine_name, name in _TARGETS.items()
    }
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=sampling_params(request.sampling, request.response),
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        tenant=request.tenant,
        priority=scheduling.priority,
        request_class=scheduling.request_class,
        cache_salt=request.kv.cache_salt,
        reads_prefix_cache=not request.kv.bypass_prefix_cache,
        **targets,
    )


def invalid_field(error: InvalidRequest, request: pb.GenerateRequest) -> Refusal:
    """The engine's refusal in the words of the wire: its field, and its unit."""
    if error.field == "prompt_token_ids":
        return invalid(request.WhichOneof("input") or "input", str(error))
    message = str(error)
    if name := _TARGETS.get(error.field):
        sent_ms = getattr(request.scheduling, name)
        message = f"{name} is {sent_ms}; in seconds it must be {error.bound}"
    return invalid(_FIELD_PATHS.get(error.field, error.field), message)


def overload(error: Overloaded) -> Refusal:
    """A refusal for load, with its bound and the time to retry."""
    return Refusal(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        _OVERLOAD_REASONS.get(error.bound, "OVERLOADED"),
        str(error),
        metadata={"bound": error.bound},
        retry_after_s=error.retry_after_s,
    )


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
        usage=pb.Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            cached_tokens=output.num_cached_tokens,
        ),
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


def load_info(
    load: Load, *, num_streams: int, compile_events_since_ready: int
) -> pb.GetLoadResponse:
    """The engine's load, and what only the server knows."""
    return pb.GetLoadResponse(
        num_running=load.num_running,
        num_queued=load.num_queued,
        num_usable_pages=load.num_usable_pages,
        num_free_pages=load.num_free_pages,
        num_cached_pages=load.num_cached_pages,
        num_host_pages=load.num_host_pages,
        num_streams=num_streams,
        queued_tokens=load.queued_tokens,
        steps_total=load.steps_total,
        preemptions_total=load.preemptions_total,
        prompt_tokens_total=load.prompt_tokens_total,
        cached_tokens_total=load.cached_tokens_total,
        output_tokens_total=load.output_tokens_total,
        compile_events_since_ready=compile_events_since_ready,
        finished_total={reason.value: count for reason, count in load.finished_total.items()},
        evicted_pages_total=load.evicted_pages_total,
        evicted_age_s_total=load.evicted_age_s_total,
        exported_pages_total=load.exported_pages_total,
        imported_pages_total=load.imported_pages_total,
        predicted_wait_s=load.predicted_wait_s,
        refused_total=load.refused_total,
        is_paused=load.is_paused,
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

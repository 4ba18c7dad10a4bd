"""From the wire (octavo_pb2) to the engine's records, and what it says of itself. Pure.

Checks nothing but what the engine never sees: bounds are engine.admission's, the same for every
front end; `invalid_field` says where on the wire the field that it names lies.
"""

from typing import Any

import grpc

from ..engine.refusals import InvalidRequest, Overloaded
from ..engine.request import Load, Request
from ..engine.sampling_params import SamplingParams
from ..models.stop_strings import StopStrings
from . import octavo_pb2 as pb
from .guides import engine_guide
from .served_model import ServedModel
from .status import Refusal, invalid

# Seconds in the engine, milliseconds on the wire.
_TARGETS = {
    "ttft_target_s": "ttft_target_ms",
    "tpot_target_s": "tpot_target_ms",
    "queue_ttl_s": "queue_ttl_ms",
}

# Called alike on the wire and in SamplingParams.
_SAMPLING_SCALARS = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "ignore_eos"),
)
_RESPONSE_SCALARS = ("logprobs", "prompt_logprobs", "top_logprobs", "prompt_top_logprobs")

_FIELD_PATHS = {
    **{name: f"sampling.{name}" for name in pb.Sampling.DESCRIPTOR.fields_by_name},
    **{name: f"response.{name}" for name in _RESPONSE_SCALARS},
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


def sampling_params(sampling: pb.Sampling, response: pb.ResponseOptions) -> SamplingParams:
    """The engine's parameters; what is absent on the wire keeps the engine's default.

    Raises:
      Refusal: The guide is none.
    """
    given: dict[str, Any] = {
        name: getattr(message, name)
        for message, names in ((sampling, _SAMPLING_SCALARS), (response, _RESPONSE_SCALARS))
        for name in names
        if message.HasField(name)
    }
    if sampling.HasField("allowed_token_ids"):
        given["allowed_token_ids"] = tuple(sampling.allowed_token_ids.ids)
    if sampling.HasField("guide"):
        given["guide"] = engine_guide(sampling.guide)
    return SamplingParams(
        stop_token_ids=tuple(sampling.stop_token_ids),
        banned_token_ids=tuple(sampling.banned_token_ids),
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        **given,
    )


def stop_strings(sampling: pb.Sampling) -> StopStrings | None:
    """What ends the text; None for nothing.

    Raises:
      Refusal: There are too many or too long ones, or none for include_stop to be about.
    """
    if not sampling.stop:
        if sampling.include_stop:
            raise invalid(
                "sampling.include_stop",
                "include_stop is true; it must be false without stop: it says whether the text "
                "holds the stop string that ended it",
            )
        return None
    try:
        return StopStrings(sampling.stop)
    except ValueError as error:
        name = str(error).split(" ", 1)[0]
        raise invalid(f"sampling.{name}", str(error)) from error


def engine_request(
    request: pb.GenerateRequest,
    *,
    request_id: str,
    prompt_token_ids: tuple[int, ...],
    sampling: SamplingParams,
    arrival_s: float,
    deadline_s: float | None,
) -> Request:
    """What the engine gets of a request whose input is tokenised.

    Args:
      request: As it was sent.
      request_id: Its id, which may be one that the server made up.
      prompt_token_ids: Its input.
      sampling: What `sampling_params` made of it.
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
        sampling=sampling,
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
        field = request.WhichOneof("input") or "input"
        return invalid(field, str(error).replace(error.field, field, 1))
    message = str(error)
    if name := _TARGETS.get(error.field):
        sent_ms = getattr(request.scheduling, name)
        message = f"{name} is {sent_ms}; in seconds it must be {error.bound}"
    if error.field == "guide" and (kind := request.sampling.guide.WhichOneof("kind")):
        return invalid(f"sampling.guide.{kind}", message.replace("guide", kind, 1))
    name, bracket, rest = error.field.partition("[")
    return invalid(f"{_FIELD_PATHS.get(name, name)}{bracket}{rest}", message)


def overload(error: Overloaded) -> Refusal:
    """A refusal for load, with its bound and the time to retry."""
    return Refusal(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        _OVERLOAD_REASONS.get(error.bound, "OVERLOADED"),
        str(error),
        metadata={"bound": error.bound},
        retry_after_s=error.retry_after_s,
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
        fingerprint=model.fingerprint,
        has_guides=model.check_guide is not None,
        tensor_parallel_size=model.tensor_parallel_size,
        attention=model.attention,
        attention_fallback_reason=model.attention_reason,
    )


def load_info(
    load: Load,
    *,
    num_streams: int,
    compile_events_since_ready: int,
    is_attention_fallback: bool,
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
        is_attention_fallback=is_attention_fallback,
    )

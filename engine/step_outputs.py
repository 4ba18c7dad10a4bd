"""What a step brought, as the outputs of requests: pure functions of its result. No JAX."""

from . import packing
from .dispatch import DispatchedStep
from .packing import StepResult
from .request import FinishReason, RequestOutput, Timings
from .schedule import PrefillChunk, RequestState


def empty_output(state: RequestState) -> RequestOutput:
    """Nothing came."""
    return RequestOutput(state.reply_to, (), state.choice)


def prompt_output(chunk: PrefillChunk, result: StepResult, at: int) -> RequestOutput:
    """Those of a chunk's log-probabilities that were not handed out.

    Chunk token i (from `start`) scores prompt token i + 1; the last prompt token scores none. A
    request that was preempted runs chunks again whose log-probabilities it has already given.

    Example: prompt of 6, handed out 2 (of tokens 1 and 2). Chunk [1, 4) scores tokens 2, 3, 4:
    the last two are fresh. Chunk [4, 6) scores token 5, and nothing after the prompt.

    Args:
      chunk: What was computed.
      result: What its step brought.
      at: Chunk tokens of other requests before it.
    """
    state, sampling = chunk.state, chunk.state.request.sampling
    output = empty_output(state)
    start = state.num_prompt_logprobs
    end = min(chunk.start + chunk.length, len(state.request.prompt_token_ids) - 1)
    if not sampling.prompt_logprobs or end <= start:
        return output
    places = at + start - chunk.start, at + end - chunk.start
    top_ids, top_logprobs = result.chunk_top(*places, sampling.prompt_top_logprobs)
    return output._replace(
        prompt_logprobs=result.chunk_logprobs(*places),
        prompt_top_token_ids=top_ids,
        prompt_top_logprobs=top_logprobs,
    )


def with_token(
    output: RequestOutput, state: RequestState, result: StepResult, row: int
) -> RequestOutput:
    """The output and the token that was sampled in `row`, with what was asked about it."""
    output = output._replace(token_ids=(result.token_ids[row],))
    sampling = state.request.sampling
    if not sampling.logprobs:
        return output
    top_ids, top_logprobs = result.top(row, sampling.top_logprobs)
    return output._replace(
        logprobs=(result.logprob(row),), top_token_ids=top_ids, top_logprobs=top_logprobs
    )


def last_output(
    output: RequestOutput,
    state: RequestState,
    reason: FinishReason,
    now_s: float,
    error: str | None = None,
) -> RequestOutput:
    """The output as the last of a choice that ends now. A token that comes with STOP stops it."""
    stopped_by = output.token_ids if reason is FinishReason.STOP else ()
    return output._replace(
        finish_reason=reason,
        stop_token_id=stopped_by[-1] if stopped_by else None,
        error=error,
        num_cached_tokens=state.num_cached_tokens,
        num_preemptions=state.num_preemptions,
        timings=Timings(
            arrival_s=state.request.arrival_s,
            admitted_s=state.admitted_s,
            first_token_s=state.first_token_s,
            finished_s=now_s,
        ),
    )


def why_no_token(status: int) -> str:
    """What clients are told about a sample that is not VALID."""
    if status & packing.BROKEN:
        return (
            "no token could be chosen: the model's logits are not finite, or no id is left that "
            "may come"
        )
    return "the engine lost track of the request"


def rows_of_record(step: DispatchedStep, result: StepResult) -> list[list[int] | None]:
    """Token and status of each row of a step whose request is still there, as recorders want it."""
    schedule, first_segment = step.schedule, step.key.rows
    rows = list(enumerate(zip(schedule.decodes, schedule.generations, strict=True)))
    rows += [
        (first_segment + index, (chunk.state, chunk.generation))
        for index, chunk in enumerate(schedule.chunks)
    ]
    return [
        [result.token_ids[row], result.statuses[row]] if state.generation == generation else None
        for row, (state, generation) in rows
    ]

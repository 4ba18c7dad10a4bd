"""`octavo generate`: continues one prompt, on the terminal or as one JSON object."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from absl import flags

from . import octavo_pb2 as pb
from .client import Answer, Choice, GenerationFailed, generate
from .command_line import EXIT_FAILURE, Command, UsageError, check_utf8
from .generation_flags import check, command_error, connected, define_generation_flags, sampling
from .request_flags import define_request_flags, set_request_flags
from .response_flags import define_response_flags, set_response_flags
from .sampling_flags import token_ids


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `octavo generate`."""
    flags.DEFINE_string("prompt", None, "Text to continue.", flag_values=values)
    flags.DEFINE_list(
        "prompt_ids", None, "Token ids to continue, separated by commas.", flag_values=values
    )
    flags.DEFINE_bool(
        "chat",
        False,
        "The prompt is what a user says; put it in the model's chat template.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "json",
        False,
        "Print one JSON object at the end instead of text as it comes.",
        flag_values=values,
    )
    define_response_flags(values)
    define_request_flags(values)
    define_generation_flags(values)


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Generates and prints; returns 0 if the output is complete."""
    request = _request(values)
    check(request, values)
    with connected(values) as channel:
        try:
            answer = generate(channel, request, _ignore if values.json else _print_text)
        except (grpc.RpcError, GenerationFailed) as error:
            raise command_error(error, values) from error
    if values.json:
        print(json.dumps(_as_json(answer, request), ensure_ascii=False))
    else:
        print(flush=True)
        print(_summary(answer), file=sys.stderr)
    is_complete = all(each.finish_reason in ("stop", "length") for each in answer.choices)
    return 0 if is_complete else EXIT_FAILURE


def _request(values: flags.FlagValues) -> pb.GenerateRequest:
    prompt, ids = values.prompt, values.prompt_ids
    if (prompt is None) == (ids is None):
        raise UsageError("give either --prompt or --prompt_ids")
    if ids is not None and values.chat:
        raise UsageError("--chat goes with --prompt, not with --prompt_ids")
    if prompt is not None:
        check_utf8("--prompt", prompt)
    request = pb.GenerateRequest(sampling=sampling(values))
    set_response_flags(values, request)
    set_request_flags(values, request)
    if ids is not None:
        request.token_ids.ids.extend(token_ids("prompt_ids", values))
        request.token_ids.SetInParent()
    elif values.chat:
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    return request


def _as_json(answer: Answer, request: pb.GenerateRequest) -> dict[str, Any]:
    """One object with everything; the parts of the only choice stand in it by themselves."""
    accepted, response = answer.accepted, request.response
    choices = [_choice_as_json(choice, response) for choice in answer.choices]
    shown: dict[str, Any] = {"request_id": accepted.request_id}
    if request.sampling.HasField("n") and request.sampling.n > 1:
        shown["choices"] = choices
    else:
        shown |= choices[0]
    shown |= _end_as_json(answer.completed or pb.Completed())
    if response.echo:
        shown["prompt_token_ids"] = answer.prompt_token_ids
        shown["prompt_text"] = answer.prompt_text
    if response.prompt_logprobs:
        shown["prompt_logprobs"] = answer.prompt_logprobs
    if response.prompt_top_logprobs:
        shown["prompt_top_logprobs"] = answer.prompt_top_logprobs
    if request.HasField("truncation"):
        shown["truncated_tokens"] = accepted.truncated_tokens
    if accepted.fingerprint:
        shown["fingerprint"] = accepted.fingerprint
    return shown


def _choice_as_json(choice: Choice, response: pb.ResponseOptions) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_token_id": choice.stop_token_id,
        "stop": choice.stop,
    }
    if response.logprobs:
        shown["logprobs"] = choice.logprobs
    if response.top_logprobs:
        shown["top_logprobs"] = choice.top_logprobs
    return shown


def _end_as_json(completed: pb.Completed) -> dict[str, Any]:
    usage, timings = completed.usage, completed.timings
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": {
            name: getattr(timings, name) if timings.HasField(name) else None
            for name in ("queue_s", "ttft_s")
        }
        | {"e2e_s": timings.e2e_s},
        "num_preemptions": completed.num_preemptions,
    }


def _summary(answer: Answer) -> str:
    """Tokens and speed, as the engine measured them."""
    completed = answer.completed or pb.Completed()
    usage, timings = completed.usage, completed.timings
    notes = {"cached": usage.cached_tokens, "more were cut off": answer.accepted.truncated_tokens}
    noted = ", ".join(f"{count} {what}" for what, count in notes.items() if count)
    prompt = f"prompt ({noted})" if noted else "prompt"
    words = [
        f"{usage.prompt_tokens} {prompt} + {usage.completion_tokens} output tokens",
        f"ended by {_end_in_words(answer.choices[0])}",
    ]
    if timings.HasField("ttft_s"):
        words.append(f"first token after {timings.ttft_s:.3f} s")
        decode_s = timings.e2e_s - timings.ttft_s
        if usage.completion_tokens > 1 and decode_s > 0:
            words.append(f"then {(usage.completion_tokens - 1) / decode_s:.1f} tokens/s")
    return ", ".join(words)


def _end_in_words(choice: Choice) -> str:
    return str(choice.finish_reason) if choice.stop is None else f"stop at {choice.stop!r}"


def _print_text(text: str) -> None:
    print(text, end="", flush=True)


def _ignore(text: str) -> None:
    pass


COMMAND = Command(
    name="generate", summary="Continues one prompt.", define_flags=define_flags, run=run
)

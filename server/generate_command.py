"""`octavo generate`: continues one prompt, on the terminal or as one JSON object."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from absl import flags

from . import octavo_pb2 as pb
from .client import Answer, GenerationFailed, generate
from .command_line import EXIT_FAILURE, Command, UsageError, check_utf8
from .generation_flags import (
    command_error,
    connected,
    define_generation_flags,
    sampling,
    token_ids,
)
from .request_flags import define_request_flags, set_request_flags


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
    flags.DEFINE_bool(
        "logprobs", False, "Add each output token's log-probability to --json.", flag_values=values
    )
    flags.DEFINE_bool(
        "prompt_logprobs",
        False,
        "Add the log-probability of each prompt token but the first to --json.",
        flag_values=values,
    )
    define_request_flags(values)
    define_generation_flags(values)


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Generates and prints; returns 0 if the output is complete."""
    request = _request(values)
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
    return 0 if answer.finish_reason in ("stop", "length") else EXIT_FAILURE


def _request(values: flags.FlagValues) -> pb.GenerateRequest:
    prompt, ids = values.prompt, values.prompt_ids
    if (prompt is None) == (ids is None):
        raise UsageError("give either --prompt or --prompt_ids")
    if ids is not None and values.chat:
        raise UsageError("--chat goes with --prompt, not with --prompt_ids")
    if prompt is not None:
        check_utf8("--prompt", prompt)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(values, name) and not values.json:
            raise UsageError(f"--{name} goes with --json")
    request = pb.GenerateRequest(
        sampling=sampling(values),
        response=pb.ResponseOptions(
            logprobs=values.logprobs, prompt_logprobs=values.prompt_logprobs
        ),
    )
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
    completed = answer.completed or pb.Completed()
    timings = completed.timings
    shown: dict[str, Any] = {
        "request_id": answer.request_id,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_token_id": answer.stop_token_id,
        "usage": {
            "prompt_tokens": completed.usage.prompt_tokens,
            "completion_tokens": completed.usage.completion_tokens,
            "cached_tokens": completed.usage.cached_tokens,
        },
        "timings": {
            name: getattr(timings, name) if timings.HasField(name) else None
            for name in ("queue_s", "ttft_s")
        }
        | {"e2e_s": timings.e2e_s},
        "num_preemptions": completed.num_preemptions,
    }
    if request.response.logprobs:
        shown["logprobs"] = answer.logprobs
    if request.response.prompt_logprobs:
        shown["prompt_logprobs"] = answer.prompt_logprobs
    return shown


def _summary(answer: Answer) -> str:
    """Tokens and speed, as the engine measured them."""
    completed = answer.completed or pb.Completed()
    usage, timings = completed.usage, completed.timings
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    words = [
        f"{usage.prompt_tokens} prompt{cached} + {usage.completion_tokens} output tokens",
        f"ended by {answer.finish_reason}",
    ]
    if timings.HasField("ttft_s"):
        words.append(f"first token after {timings.ttft_s:.3f} s")
        decode_s = timings.e2e_s - timings.ttft_s
        if usage.completion_tokens > 1 and decode_s > 0:
            words.append(f"then {(usage.completion_tokens - 1) / decode_s:.1f} tokens/s")
    return ", ".join(words)


def _print_text(text: str) -> None:
    print(text, end="", flush=True)


def _ignore(text: str) -> None:
    pass


COMMAND = Command(
    name="generate", summary="Continues one prompt.", define_flags=define_flags, run=run
)

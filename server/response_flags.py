"""The flags of `octavo generate` that say what comes back, and how much of the prompt goes in."""

from absl import flags

from . import octavo_pb2 as pb
from .command_line import UsageError, is_given
from .sampling_flags import set_number

_NEED_JSON = {
    "logprobs": "Add each output token's log-probability to --json.",
    "prompt_logprobs": "Add the log-probability of each prompt token but the first to --json.",
}
_NUMBERS_NEED_JSON = {
    "top_logprobs": "Add so many of the most likely ids of each output token to --json.",
    "prompt_top_logprobs": "Add so many of the most likely ids of each prompt token to --json.",
}
_SIDES = {"left": pb.TRUNCATION_SIDE_LEFT, "right": pb.TRUNCATION_SIDE_RIGHT}


def define_response_flags(values: flags.FlagValues) -> None:
    """Defines them."""
    flags.DEFINE_integer(
        "n",
        None,
        "Outputs for the one prompt; several need --json. Default: 1.",
        flag_values=values,
    )
    for name, meaning in _NEED_JSON.items():
        flags.DEFINE_bool(name, False, meaning, flag_values=values)
    for name, meaning in _NUMBERS_NEED_JSON.items():
        flags.DEFINE_integer(name, None, meaning, flag_values=values)
    flags.DEFINE_bool(
        "echo",
        False,
        "Print the prompt's text first; with --json it is prompt_text.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "skip_special_tokens", True, "Leave control tokens out of the text.", flag_values=values
    )
    flags.DEFINE_integer(
        "max_prompt_tokens",
        None,
        "Cut the prompt to so many tokens, or with -1 to what fits beside --max_tokens. Default: "
        "refuse a prompt that does not fit.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "truncation_side",
        None,
        list(_SIDES),
        "Which end of the prompt is cut off; with --max_prompt_tokens. Default: left.",
        flag_values=values,
    )


def set_response_flags(values: flags.FlagValues, request: pb.GenerateRequest) -> None:
    """Puts what the flags say into a request.

    Raises:
      UsageError: A flag needs another, or does not fit the wire.
    """
    for name in ("n", *_NEED_JSON, *_NUMBERS_NEED_JSON):
        value = getattr(values, name)
        is_plain = value == 1 if name == "n" else not value
        if value is not None and not is_plain and not values.json:
            raise UsageError(f"--{name} goes with --json")
    set_number(request.sampling, "n", values)
    for name in (*_NEED_JSON, "echo", "skip_special_tokens"):
        if is_given(values, name):
            setattr(request.response, name, getattr(values, name))
    for name in _NUMBERS_NEED_JSON:
        set_number(request.response, name, values)
    if values.max_prompt_tokens is None:
        if values.truncation_side is not None:
            raise UsageError("--truncation_side goes with --max_prompt_tokens")
        return
    set_number(request.truncation, "max_prompt_tokens", values)
    if values.truncation_side is not None:
        request.truncation.side = _SIDES[values.truncation_side]

"""The flags that say how tokens are chosen and when the output ends: the fields of pb.Sampling.

One that is not given is not sent, so the server's documented default holds.
"""

from absl import flags

from . import octavo_pb2 as pb
from .command_line import UsageError, check_utf8, is_given

_WHOLE_NUMBERS = {
    "max_tokens": "Most output tokens. Default: up to the context limit.",
    "min_tokens": "Output tokens before a stop id or stop string may end the output. Default: 0.",
    "top_k": "Sample from the k most likely tokens. Default: all.",
    "seed": "The same seed gives the same output. Default: the engine picks one.",
}
_NUMBERS = {
    "temperature": (
        "0 always takes the most likely token; 1 samples from the model's own distribution. "
        "Default: 1."
    ),
    "top_p": "Sample from the most likely tokens whose probabilities sum to this. Default: 1.",
    "min_p": (
        "Sample from tokens at least this many times as likely as the likeliest. Default: 0."
    ),
    "repetition_penalty": (
        "Divide a positive logit of a token that is in the prompt or the output by this, and "
        "multiply a negative one. Default: 1."
    ),
    "frequency_penalty": (
        "Take this off a logit for each time that its token is in the output. Default: 0."
    ),
    "presence_penalty": "Take this off a logit whose token is in the output. Default: 0.",
}
_ID_LISTS = {
    "stop_token_ids": "Token ids that end the output, separated by commas.",
    "allowed_token_ids": "The only token ids that may come, separated by commas. Default: all.",
    "banned_token_ids": "Token ids that must not come, separated by commas.",
}


def define_sampling_flags(values: flags.FlagValues) -> None:
    """Defines one for each field but n and guide."""
    for name, meaning in _WHOLE_NUMBERS.items():
        flags.DEFINE_integer(name, None, meaning, flag_values=values)
    for name, meaning in _NUMBERS.items():
        flags.DEFINE_float(name, None, meaning, flag_values=values)
    flags.DEFINE_list(
        "logit_bias",
        [],
        "What to add to logits, as ID:BIAS separated by commas.",
        flag_values=values,
    )
    for name, meaning in _ID_LISTS.items():
        flags.DEFINE_list(name, [], meaning, flag_values=values)
    flags.DEFINE_multi_string(
        "stop",
        [],
        "A text that ends the output where it begins; may be given several times.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "include_stop",
        False,
        "End after the stop text, not before it; goes with --stop.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "ignore_eos", False, "Go on after the model's end-of-sequence ids.", flag_values=values
    )


def sampling_message(values: flags.FlagValues) -> pb.Sampling:
    """The sampling flags as they are sent.

    Raises:
      UsageError: A value does not fit the wire. The server knows the real bounds.
    """
    message = pb.Sampling(
        stop_token_ids=token_ids("stop_token_ids", values),
        banned_token_ids=token_ids("banned_token_ids", values),
        logit_bias=_logit_biases(values.logit_bias),
        stop=_texts("stop", values),
    )
    for name in (*_WHOLE_NUMBERS, *_NUMBERS):
        set_number(message, name, values)
    if is_given(values, "allowed_token_ids"):
        message.allowed_token_ids.ids.extend(token_ids("allowed_token_ids", values))
        message.allowed_token_ids.SetInParent()
    for name in ("include_stop", "ignore_eos"):
        if is_given(values, name):
            setattr(message, name, getattr(values, name))
    return message


def set_number(
    message: pb.Sampling | pb.ResponseOptions | pb.Truncation, name: str, values: flags.FlagValues
) -> None:
    """Puts the flag of a number into the field of the same name, if it is given.

    Raises:
      UsageError: It does not fit the wire.
    """
    value = getattr(values, name)
    if value is None:
        return
    try:
        setattr(message, name, value)
    except ValueError as error:
        bound = "[0, 2**64)" if name == "seed" else "[-(2**63), 2**63)"
        raise UsageError(f"--{name} is {value}; it must be in {bound}") from error


def token_ids(name: str, values: flags.FlagValues) -> list[int]:
    """The ids of a flag that lists them.

    Raises:
      UsageError: One is no whole number, or does not fit the wire.
    """
    words: list[str] = getattr(values, name) or []
    try:
        ids = [int(word) for word in words]
    except ValueError as error:
        raise UsageError(f"--{name} is {','.join(words)}; it must be whole numbers") from error
    for token_id in ids:
        if not 0 <= token_id < 2**63:
            raise UsageError(f"--{name} has {token_id}; it must be a token id, 0 or more")
    return ids


def _logit_biases(words: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token_id, bias in map(_logit_bias, words):
        if token_id in biases:
            raise UsageError(f"--logit_bias has {token_id} twice; it must have each id once")
        biases[token_id] = bias
    return biases


def _logit_bias(word: str) -> tuple[int, float]:
    token_id, separator, bias = word.partition(":")
    try:
        if not separator or not 0 <= int(token_id) < 2**63:
            raise ValueError
        return int(token_id), float(bias)
    except ValueError as error:
        raise UsageError(f"--logit_bias has {word!a}; it must be ID:BIAS") from error


def _texts(name: str, values: flags.FlagValues) -> list[str]:
    texts: list[str] = getattr(values, name)
    for text in texts:
        check_utf8(f"--{name}", text)
    return texts

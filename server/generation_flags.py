"""The flags of commands that generate: which server, and how tokens are chosen.

A sampling flag that is not given is not sent, so the server's documented default holds.
"""

import functools
import secrets
import sys
from collections.abc import Generator
from contextlib import contextmanager

import grpc
from absl import flags

from . import octavo_pb2 as pb
from .client import GenerationFailed, open_channel, retry_after_s
from .command_line import CommandError, UsageError
from .engine_flags import define_engine_flags, model_options, refuse_engine_flags
from .late_import import late_import
from .progress import ProgressDisplay

# One request at a time needs one slot, and few executables to compile.
_LOCAL_MAX_NUM_SEQS = 1
_LOCAL_FIELDS = (
    "prefill_chunk_tokens",
    "max_model_len",
    "page_size",
    "num_pages",
    "kv_cache_bytes",
)


def define_generation_flags(values: flags.FlagValues) -> None:
    """Defines them, and those of the engine that runs if no server is named."""
    flags.DEFINE_string(
        "server",
        None,
        "host:port of a running server. Default: load a model in this process.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "max_tokens",
        None,
        "Most output tokens. Default: up to the context limit.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "temperature",
        None,
        "0 always takes the most likely token; 1 samples from the model's own distribution. "
        "Default: 1.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "top_k", None, "Sample from the k most likely tokens. Default: all.", flag_values=values
    )
    flags.DEFINE_float(
        "top_p",
        None,
        "Sample from the most likely tokens whose probabilities sum to this. Default: 1.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "min_p",
        None,
        "Sample from tokens at least this many times as likely as the likeliest. Default: 0.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "seed",
        None,
        "The same seed gives the same output. Default: the engine picks one.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "stop_token_ids",
        [],
        "Token ids that end the output, separated by commas.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "ignore_eos", False, "Go on after the model's end-of-sequence ids.", flag_values=values
    )
    define_engine_flags(values, _LOCAL_FIELDS)


def sampling(values: flags.FlagValues) -> pb.Sampling:
    """The sampling flags as they are sent.

    Raises:
      UsageError: A number does not fit the wire. The server knows the real bounds.
    """
    message = pb.Sampling(stop_token_ids=token_ids("stop_token_ids", values))
    for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"):
        value = getattr(values, name)
        if value is not None:
            try:
                setattr(message, name, value)
            except ValueError as error:
                bound = "[0, 2**64)" if name == "seed" else "[-(2**63), 2**63)"
                raise UsageError(f"--{name} is {value}; it must be in {bound}") from error
    if values.ignore_eos:
        message.ignore_eos = True
    return message


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


@contextmanager
def connected(values: flags.FlagValues) -> Generator[grpc.Channel]:
    """A channel to the server that the flags name, or to one in this process.

    Raises:
      UsageError: A flag of the model goes with --server, or one cannot be.
      ValueError: A size of the engine cannot be; names it, its value and the bound.
      CommandError: The model cannot be had or read.
    """
    if values.server is not None:
        refuse_engine_flags(
            values, _LOCAL_FIELDS, "is for a model in this process; leave it out, or --server"
        )
        if "://" in values.server:
            raise UsageError(f"--server is {values.server!r}; it must be host:port")
        with open_channel(values.server) as channel:
            yield channel
        return
    options = model_options(
        values,
        _LOCAL_FIELDS,
        max_num_seqs=_LOCAL_MAX_NUM_SEQS,
        seed=secrets.randbits(64),  # an engine that lives for one command says something new
    )
    # Imported late: JAX takes a second, and a remote server's client needs none of it.
    load_model = late_import("model_loading").load_model
    local_server = late_import("local_server").local_server
    display = ProgressDisplay(sys.stderr)
    try:
        with (
            local_server(functools.partial(load_model, options), display) as address,
            open_channel(address) as channel,
        ):
            display.close()
            yield channel
    finally:
        display.close()  # if loading failed: what went wrong is said on a line of its own


def command_error(
    error: grpc.RpcError | GenerationFailed, values: flags.FlagValues
) -> CommandError:
    """What a command says when its request failed."""
    if not isinstance(error, grpc.Call):
        return CommandError(str(error))
    message = str(error.details())
    if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
        wait_s = retry_after_s(error)
        hint = "" if wait_s is None else f"; try again in {wait_s:.1f} s"
        return CommandError(f"{error.code().name}: {message}{hint}")
    # The message begins with the field at fault, and fields are called as the flags are.
    field = message.split(" ", 1)[0].split("[")[0]
    return UsageError(f"--{message}" if field in values else message)

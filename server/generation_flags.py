"""The flags of commands that generate: which server, what is sampled how; and the way to it."""

import functools
import secrets
import sys
from collections.abc import Generator
from contextlib import contextmanager

import grpc
from absl import flags

from ..engine.refusals import InvalidRequest
from ..engine.sampling_checks import check_sampling
from . import octavo_pb2 as pb
from .client import GenerationFailed, open_channel, retry_after_s
from .command_line import CommandError, UsageError
from .conversion import invalid_field, sampling_params
from .engine_flags import define_engine_flags, model_options, refuse_engine_flags
from .guide_flags import define_guide_flags, set_guide_flags
from .late_import import late_import
from .progress import ProgressDisplay
from .sampling_flags import define_sampling_flags, sampling_message
from .status import Refusal

# One request at a time needs one slot, and few executables to compile.
_LOCAL_MAX_NUM_SEQS = 1
_ANY_VOCABULARY = 2**31
_INPUT_FLAGS = {"text": "prompt", "chat": "prompt", "token_ids": "prompt_ids"}
_LOCAL_FIELDS = (
    "tensor_parallel_size",
    "prefill_chunk_tokens",
    "max_model_len",
    "page_size",
    "num_pages",
    "kv_cache_bytes",
    "max_stop_ids",
)


def define_generation_flags(values: flags.FlagValues) -> None:
    """Defines them, and those of the engine that runs if no server is named."""
    flags.DEFINE_string(
        "server",
        None,
        "host:port of a running server. Default: load a model in this process.",
        flag_values=values,
    )
    define_sampling_flags(values)
    define_guide_flags(values)
    define_engine_flags(values, _LOCAL_FIELDS)


def sampling(values: flags.FlagValues) -> pb.Sampling:
    """What the flags say of sampling, the guide included; raises UsageError for what cannot be."""
    message = sampling_message(values)
    set_guide_flags(values, message)
    return message


def check(request: pb.GenerateRequest, values: flags.FlagValues) -> None:
    """Refuses what no model could do, before anything is loaded for it.

    Raises:
      UsageError: Names the flag. The server knows the bounds that depend on its model.
    """
    try:
        sampling = sampling_params(request.sampling, request.response)
        check_sampling(sampling, vocab_size=_ANY_VOCABULARY)
    except InvalidRequest as error:
        raise _usage_error(invalid_field(error, request).message, values) from error
    except Refusal as error:
        raise _usage_error(error.message, values) from error


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
    return _usage_error(message, values)


def _usage_error(message: str, values: flags.FlagValues) -> UsageError:
    """A refusal that begins with the field at fault; fields are mostly called as the flags are."""
    field = message.split(" ", 1)[0].split("[")[0]
    flag = _INPUT_FLAGS.get(field, field)
    return UsageError(f"--{message.replace(field, flag, 1)}" if flag in values else message)

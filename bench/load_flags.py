"""The flags that throughput and the comparisons share: how much load, and which server to start."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from absl import flags

from ..configs.engine_config import DType, EngineConfig
from ..configs.presets import DEFAULT_PRESET
from ..server.command_line import UsageError
from .load import LoadOptions
from .server_process import serve_command
from .workload import Workload

SERVER_FLAGS = ("model", "dtype", "serve_flags", "start_timeout_s")
"""Flags of the server that a benchmark starts."""


def define_load_flags(values: flags.FlagValues) -> None:
    """Defines the flags that say how much of what is sent."""
    workload = Workload()
    options = LoadOptions(workload=workload)
    define_workload_flags(values, "Tokens of each output; end-of-sequence ids do not stop.")
    flags.DEFINE_list(
        "concurrency",
        [str(level) for level in options.concurrency],
        "Numbers of clients that send at once, separated by commas; one level after the other.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "rounds",
        options.rounds,
        "Timed rounds of each kind at each level; the numbers are medians over them.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "requests_per_client",
        options.requests_per_client,
        "Requests that each client sends in a round, one after the other.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "temperature", workload.temperature, "Of sampled requests, above 0.", flag_values=values
    )
    flags.DEFINE_float("top_p", workload.top_p, "Of sampled requests.", flag_values=values)
    flags.DEFINE_string(
        "prompt_text",
        None,
        "UTF-8 file to cut prompts from, at random places. Default: prompts of random ids.",
        flag_values=values,
    )


def define_workload_flags(values: flags.FlagValues, output_tokens: str) -> None:
    """Defines what every load has: sizes of requests, a seed, and how results are printed.

    Args:
      values: The command's.
      output_tokens: What the flag of that name means.
    """
    workload = Workload()
    flags.DEFINE_integer(
        "prompt_tokens", workload.prompt_tokens, "Tokens of each prompt.", flag_values=values
    )
    flags.DEFINE_integer("output_tokens", workload.output_tokens, output_tokens, flag_values=values)
    flags.DEFINE_integer(
        "seed",
        workload.seed,
        "Where everything that is drawn at random comes from.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "json", False, "Print one JSON object instead of a table.", flag_values=values
    )


def load_options(values: flags.FlagValues) -> LoadOptions:
    """What those flags say.

    Raises:
      ValueError: One cannot be; names it, its value and the bound.
      UsageError: Likewise.
    """
    return LoadOptions(
        workload=Workload(
            prompt_tokens=values.prompt_tokens,
            output_tokens=values.output_tokens,
            temperature=values.temperature,
            top_p=values.top_p,
            seed=values.seed,
        ),
        concurrency=_levels(values.concurrency),
        rounds=values.rounds,
        requests_per_client=values.requests_per_client,
        prompt_text=None if values.prompt_text is None else _read(values.prompt_text),
    )


def define_server_flags(values: flags.FlagValues) -> None:
    """Defines SERVER_FLAGS."""
    flags.DEFINE_string(
        "model", DEFAULT_PRESET, "A preset or a path, as `octavo serve` has it.", flag_values=values
    )
    flags.DEFINE_enum(
        "dtype",
        EngineConfig().dtype,
        list(get_args(DType)),
        "Of weights and KV pages.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "serve_flags",
        "",
        "More flags for `octavo serve`, as a shell would split them.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "start_timeout_s",
        600.0,
        "Seconds that loading and compiling may take.",
        lower_bound=0.0,
        flag_values=values,
    )


def server_command(values: flags.FlagValues) -> list[str]:
    """The command of the server that those flags describe, on a free port."""
    try:
        more = shlex.split(values.serve_flags)
    except ValueError as error:
        raise UsageError(f"--serve_flags is {values.serve_flags!r}; {error}") from error
    fixed = ["--port=0", "--withdrawal_grace_s=0"]
    return serve_command([*fixed, f"--model={values.model}", f"--dtype={values.dtype}", *more])


def _levels(words: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise UsageError(f"--concurrency is {','.join(words)}; it must be whole numbers") from error


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt_text is {path!r}: {error}") from error

"""The flags that say which model to load and how large its engine is.

Shared by `serve` and by the commands that load a model themselves. Names and defaults are those of
EngineConfig, which also checks the values.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from absl import flags

from ..configs.engine_config import AttentionName, DType, EngineConfig
from ..configs.presets import DEFAULT_PRESET, fetchable_preset_names
from ..configs.scheduling_config import SchedulingConfig
from ..models.fetch import default_cache_dir
from .command_line import UsageError, is_given

_HELP = {
    "tensor_parallel_size": (
        "Devices that share each layer. Bytes of memory are of each of them. A CPU looks like N "
        "devices with XLA_FLAGS=--xla_force_host_platform_device_count=N."
    ),
    "max_num_seqs": "Requests that run at once.",
    "max_num_batched_tokens": (
        "Most tokens in one step, running requests and prompt tokens together; more than "
        "max_num_seqs. Default: max_num_seqs + prefill_chunk_tokens."
    ),
    "prefill_chunk_tokens": (
        "Most prompt tokens in one step. Default with --deterministic: 32, or page_size if larger."
    ),
    "max_model_len": (
        "Most tokens of one request, prompt and output together. Default: what the model was "
        "trained for, or what the pages hold if that is less."
    ),
    "page_size": "Tokens per KV page.",
    "num_pages": "KV pages, one of which stays empty. Default: from kv_cache_bytes.",
    "kv_cache_bytes": "Bytes of all KV pages, on each device. Default: from device_memory_bytes.",
    "device_memory_bytes": (
        "Bytes of each device that weights, programs, temporaries and KV pages may take together. "
        "Default: all that the device reports; a CPU reports none, and there the KV pages take at "
        "most a quarter of the free memory."
    ),
    "host_kv_bytes": (
        "Bytes of host memory, for all devices together, for KV pages that had to leave them; 0 "
        "drops them. With --deterministic it is what preempted requests keep theirs in; more "
        "requests run at once."
    ),
    "seed": "Where the seeds of requests come from that bring none.",
    "max_stop_ids": "Stop ids per request, the model's end-of-sequence ids included.",
}

ALL_FIELDS = tuple(_HELP)
"""Fields of EngineConfig that can be flags; dtype, attention and deterministic always are, and
`scheduling` is many."""

_DETERMINISTIC_CHUNK = 32  # every step pays for a whole chunk, prompts or not


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What to load.

    Attributes:
      model: A preset's name, or the path of a GGUF file, a Hugging Face folder or a folder that
        `octavo convert` wrote.
      served_name: What clients call it. None: the preset's name, or the file's or folder's.
      engine: Sizes of the engine.
      cache_dir: Where fetched weights are.
      compilation_cache_dir: Where compiled programs are kept for the next start. None: nowhere.
      event_log: File that gets what the scheduler is told and decides. None: none.
      event_log_max_bytes: Where that file ends.
    """

    model: str
    served_name: str | None
    engine: EngineConfig
    cache_dir: Path
    compilation_cache_dir: Path | None
    event_log: Path | None = None
    event_log_max_bytes: int = 0


def define_engine_flags(values: flags.FlagValues, fields: tuple[str, ...]) -> None:
    """Defines them.

    Args:
      values: The command's.
      fields: Which of ALL_FIELDS become flags.
    """
    flags.DEFINE_string(
        "model",
        DEFAULT_PRESET,
        f"A preset ({', '.join(fetchable_preset_names())}), a GGUF file, a Hugging Face folder, or "
        "a folder that `octavo convert` wrote.",
        flag_values=values,
    )
    define_size_flags(values, fields)
    flags.DEFINE_string(
        "compilation_cache_dir",
        str(default_cache_dir() / "compiled"),
        "Folder that keeps compiled programs for the next start. Empty: none.",
        flag_values=values,
    )


def define_size_flags(values: flags.FlagValues, fields: tuple[str, ...]) -> None:
    """Defines those that say what the engine is like, whatever it serves; arguments as above."""
    define_dtype_flag(values, "Of weights and KV pages.")
    defaults = EngineConfig()
    flags.DEFINE_bool(
        "deterministic",
        defaults.deterministic,
        "The same prompt, parameters and seed give the same bits whatever runs beside. Costs "
        "throughput: every step runs the one executable that there is.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "attention",
        defaults.attention,
        list(get_args(AttentionName)),
        "What attends over the KV pages. auto: the platform's kernels where there are any for the "
        "model's shape, plain JAX else. The others: that, or an error.",
        flag_values=values,
    )
    for name in fields:
        flags.DEFINE_integer(name, getattr(defaults, name), _HELP[name], flag_values=values)


def define_dtype_flag(values: flags.FlagValues, meaning: str) -> None:
    """Defines --dtype, which means what `meaning` says."""
    flags.DEFINE_enum(
        "dtype", EngineConfig().dtype, list(get_args(DType)), meaning, flag_values=values
    )


def refuse_engine_flags(values: flags.FlagValues, fields: tuple[str, ...], why: str) -> None:
    """Raises UsageError if any of these flags is given, where it would mean nothing."""
    for name in ("model", "dtype", "attention", "deterministic", *fields, "compilation_cache_dir"):
        if is_given(values, name):
            raise UsageError(f"--{name} {why}")


def model_options(
    values: flags.FlagValues,
    fields: tuple[str, ...],
    *,
    served_name: str | None = None,
    scheduling: SchedulingConfig | None = None,
    **fixed: int,
) -> ModelOptions:
    """What the flags say; raises ValueError naming the flag, its value and the bound.

    Args:
      values: The command's, parsed.
      fields: Those it defined.
      served_name: What clients will call the model.
      scheduling: Who goes first. None: the defaults.
      fixed: Other fields of EngineConfig.
    """
    cache = values.compilation_cache_dir
    return ModelOptions(
        model=values.model,
        served_name=served_name,
        engine=engine_config(values, fields, scheduling=scheduling, **fixed),
        cache_dir=default_cache_dir(),
        compilation_cache_dir=Path(cache) if cache else None,
    )


def engine_config(
    values: flags.FlagValues,
    fields: tuple[str, ...],
    *,
    scheduling: SchedulingConfig | None = None,
    **fixed: int,
) -> EngineConfig:
    """The sizes that the flags say; arguments and errors as of model_options."""
    config = {name: getattr(values, name) for name in fields} | fixed
    if values.deterministic and not is_given(values, "prefill_chunk_tokens"):
        page_size = max(values.page_size, 1)  # what is less is refused below
        config["prefill_chunk_tokens"] = -(-_DETERMINISTIC_CHUNK // page_size) * page_size
    return EngineConfig(
        dtype=values.dtype,
        attention=values.attention,
        deterministic=values.deterministic,
        scheduling=scheduling or SchedulingConfig(),
        **config,
    )

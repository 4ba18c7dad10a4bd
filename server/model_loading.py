"""Brings up a real model: weights, tokenizer, engine and its thread. Where the server meets JAX."""

import datetime
import time
from collections.abc import Callable
from pathlib import Path

from ..configs.presets import fetchable_preset_names, preset_names
from ..engine.build import build_engine
from ..engine.compilation import compile_events, use_persistent_cache
from ..engine.engine_thread import EngineThread
from ..engine.event_log import EventLog
from ..engine.guides import Guides
from ..engine.request import RequestOutput
from ..models.checkpoint import CheckpointError, open_checkpoint
from ..models.fetch import FetchError, fetch
from ..models.tokenizer import load_tokenizer
from .command_line import CommandError, UsageError
from .engine_flags import ModelOptions
from .model_codec import ModelCodec
from .progress import OnProgress
from .served_model import ServedModel


def load_model(
    options: ModelOptions,
    on_outputs: Callable[[list[RequestOutput]], None],
    on_progress: OnProgress,
) -> ServedModel:
    """Loads and compiles; returns when the engine runs. Blocks for seconds to minutes.

    Args:
      options: Which model, and how large.
      on_outputs: Gets what each step brings, on the engine's thread.
      on_progress: Told how far it is.

    Raises:
      ValueError: A field of options.engine asks for more than there is.
      CommandError: The model cannot be had or read.
    """
    if options.compilation_cache_dir is not None:
        try:
            use_persistent_cache(options.compilation_cache_dir)
        except OSError as error:
            raise UsageError(f"--compilation_cache_dir cannot be made: {error}") from error
    path = _find(options, on_progress)
    recorder = _event_log(options)
    try:
        on_progress("reading the tokenizer", 0, 0)
        checkpoint = open_checkpoint(path)
        tokenizer = load_tokenizer(checkpoint.tokenizer_source)
        eos_token_ids = checkpoint.eos_token_ids | tokenizer.eos_token_ids
        guides = Guides(
            tokenizer, vocab_size=checkpoint.config.vocab_size, eos_token_ids=eos_token_ids
        )
        guides.prepare()
        built = build_engine(
            checkpoint,
            options.engine,
            eos_token_ids=eos_token_ids,
            clock=time.monotonic,
            on_progress=on_progress,
            tokenizer=tokenizer,
            guides=guides,
            recorder=recorder,
        )
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    limits = built.engine.limits
    thread = EngineThread(built.engine, on_outputs, time.monotonic)
    thread.start()
    events_at_ready = compile_events()
    return ServedModel(
        name=options.served_name or _name(options.model),
        engine=thread,
        codec=ModelCodec(tokenizer, _now),
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=limits.eos_token_ids,
        dtype=options.engine.dtype,
        device=built.device,
        max_num_seqs=options.engine.max_num_seqs,
        num_pages=limits.num_pages,
        page_size=options.engine.page_size,
        num_executables=built.num_executables,
        compile_s=built.compile_s,
        fingerprint=built.fingerprint,
        tensor_parallel_size=options.engine.tensor_parallel_size,
        attention=built.attention,
        attention_reason=built.attention_reason,
        compile_events_since_ready=lambda: compile_events() - events_at_ready,
        check_guide=guides.check,
    )


def _event_log(options: ModelOptions) -> EventLog | None:
    if options.event_log is None:
        return None
    try:
        return EventLog(
            options.event_log,
            options.event_log_max_bytes,
            moment=(time.monotonic(), datetime.datetime.now(datetime.UTC)),
        )
    except FileExistsError as error:
        raise UsageError(
            f"--event_log is {str(options.event_log)!r}, which exists and is kept; choose another "
            "name"
        ) from error
    except OSError as error:
        raise UsageError(f"--event_log cannot be made: {error}") from error


def _find(options: ModelOptions, on_progress: OnProgress) -> Path:
    """The path of the weights; fetches those of a preset."""
    if options.model in preset_names():
        on_progress(f"finding the weights of {options.model}", 0, 0)
        try:
            return fetch(options.model, options.cache_dir)
        except FetchError as error:
            raise CommandError(str(error)) from error
    path = Path(options.model)
    if not path.exists():
        raise UsageError(
            f"--model is {options.model!r}; it must be a preset "
            f"({', '.join(fetchable_preset_names())}) or the path of a file or folder"
        )
    return path


def _name(model: str) -> str:
    """A preset's name as it is; a path without its folder and .gguf."""
    return model if model in preset_names() else Path(model).resolve().name.removesuffix(".gguf")


def _now() -> datetime.datetime:
    return datetime.datetime.now().astimezone()

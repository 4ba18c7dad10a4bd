"""Octavo's own format: a folder with the decoder's parameters as Orbax stores arrays.

    octavo.json   architecture and end-of-sequence ids
    parameters/   one array for each parameter of the decoder, by its path
    tokenizer/    the tokenizer's files, or tokenizer.gguf: a GGUF file without tensors

It loads fastest: nothing is decoded or fused, and each device reads only its shard. The sharding
and dtype of the reader count, never the writer's.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from ..configs.model_config import ModelConfig, RopeScaling
from .checkpoint_format import Checkpoint
from .decoder import ParameterSpec
from .gguf_file import read_gguf
from .metadata import CheckpointError, check_token_ids, read_json
from .stored_tensors import ShardingOf

DESCRIPTION_FILE = "octavo.json"
FORMAT_VERSION = 2
_PARAMETERS = "parameters"
_TOKENIZER = "tokenizer"
_TOKENIZER_GGUF = "tokenizer.gguf"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, kw_only=True)
class OrbaxCheckpoint(Checkpoint):
    """An open folder in Octavo's own format."""

    def load(
        self, declared: Mapping[str, ParameterSpec], sharding_of: ShardingOf
    ) -> dict[str, jax.Array]:
        """See Checkpoint."""
        folder = (self.path / _PARAMETERS).resolve()
        largest_bytes = max(4 * math.prod(spec.shape) for spec in declared.values())
        handler = ocp.BasePyTreeCheckpointHandler(
            # Bounds what is read and not yet on its device. Orbax refuses a parameter that does
            # not fit, and counts whole chunks, of which a shard may cut two.
            restore_concurrent_bytes=2 * largest_bytes
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(handler_impl=handler)) as checkpointer:
            try:
                _check_complete(folder, checkpointer.metadata(folder), declared)
                return checkpointer.restore(
                    folder,
                    args=ocp.args.PyTreeRestore(
                        item=dict.fromkeys(declared, 0),
                        restore_args={
                            path: ocp.ArrayRestoreArgs(
                                sharding=sharding_of(spec),
                                global_shape=spec.shape,
                                dtype=spec.dtype,
                            )
                            for path, spec in declared.items()
                        },
                    ),
                )
            except CheckpointError:
                raise
            except Exception as error:  # Damage surfaces as whatever TensorStore makes of it.
                raise CheckpointError(f"{folder}: not readable by Orbax: {error}") from error


def open_orbax_checkpoint(folder: Path) -> OrbaxCheckpoint:
    """Opens a folder that `save_orbax` wrote; raises CheckpointError if it is damaged."""
    source = folder / DESCRIPTION_FILE
    description = read_json(source)
    if description.integer("format_version") != FORMAT_VERSION:
        raise description.error("format_version", f"{FORMAT_VERSION}; convert the model again")
    try:
        values = dict(description.values["config"])
        if values["rope_scaling"] is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        config = ModelConfig(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: config is no model config: {error}") from error
    eos_token_ids = description.token_ids("eos_token_ids")
    check_token_ids(eos_token_ids, config.vocab_size, source)
    tokenizer = folder / _TOKENIZER
    vocabulary = tokenizer / _TOKENIZER_GGUF
    return OrbaxCheckpoint(
        path=folder,
        config=config,
        eos_token_ids=eos_token_ids,
        tokenizer_source=vocabulary if vocabulary.exists() else tokenizer,
    )


def save_orbax(
    destination: Path, checkpoint: Checkpoint, parameters: Mapping[str, jax.Array]
) -> None:
    """Writes parameters and what belongs to them into a new folder.

    The folder appears under its name only when it is complete.

    Args:
      destination: The folder; must not exist.
      checkpoint: Whose architecture, end-of-sequence ids and tokenizer are written.
      parameters: The decoder's parameters, by path.

    Raises:
      CheckpointError: The destination, or what an interrupted run left beside it, exists, or it
        cannot be written.
    """
    destination = destination.resolve()
    partial = destination.with_name(destination.name + ".partial")
    for path in (destination, partial):
        if path.exists():
            raise CheckpointError(f"{path}: exists already; nothing is ever overwritten")
    try:
        str(destination).encode()
    except UnicodeEncodeError as error:
        # TensorStore would find out in one of its tasks, while others still make folders.
        raise CheckpointError(f"{destination}: cannot be written: not UTF-8") from error
    partial.mkdir(parents=True)
    try:
        # Orbax finds out half-way, from many tasks at once, and its account is pages long.
        needed, free = sum(x.nbytes for x in parameters.values()), shutil.disk_usage(partial).free
        if free < needed:
            raise CheckpointError(f"{destination}: needs {needed} bytes, and {free} are free")
        # Compressed, a bfloat16 model is a quarter smaller and takes twice as long to load.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        with ocp.Checkpointer(handler) as checkpointer:
            try:
                tree = ocp.args.PyTreeSave(dict(parameters))
                checkpointer.save(partial / _PARAMETERS, args=tree)
            except Exception as error:  # whatever TensorStore makes of a disk or a name
                raise CheckpointError(f"{destination}: cannot be written: {error}") from error
        _copy_tokenizer(checkpoint.tokenizer_source, partial / _TOKENIZER)
        description = {
            "format_version": FORMAT_VERSION,
            "config": dataclasses.asdict(checkpoint.config),
            "eos_token_ids": sorted(checkpoint.eos_token_ids),
        }
        text = json.dumps(description, indent=2) + "\n"
        (partial / DESCRIPTION_FILE).write_text(text, "utf-8")
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _copy_tokenizer(source: Path, destination: Path) -> None:
    destination.mkdir()
    if source.is_file():
        (destination / _TOKENIZER_GGUF).write_bytes(read_gguf(source).without_tensors())
        return
    for name in _TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)


def _check_complete(
    source: Path, metadata: ocp.metadata.StepMetadata, declared: Mapping[str, ParameterSpec]
) -> None:
    if metadata.item_metadata is None:
        raise CheckpointError(f"{source}: holds no Orbax checkpoint, or a damaged one")
    stored = metadata.item_metadata.tree
    for path, spec in declared.items():
        if path not in stored:
            raise CheckpointError(f"{source}: parameter {path} is missing")
        if tuple(stored[path].shape) != spec.shape:
            raise CheckpointError(
                f"{source}: parameter {path} has shape {list(stored[path].shape)}; "
                f"the model needs {list(spec.shape)}"
            )
    for path in sorted(stored.keys() - declared.keys()):
        raise CheckpointError(f"{source}: the model has no place for parameter {path}")

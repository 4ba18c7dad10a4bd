"""Hugging Face folders: config.json and *.safetensors, in one file or several. Never pickle."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from .checkpoint_format import Checkpoint
from .decoder import ParameterSpec
from .huggingface_config import read_huggingface_config
from .metadata import CheckpointError, read_json
from .stored_tensors import ShardingOf, StoredTensors, check_equal, load_parameters

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LAYER = "model.layers.{i}."
_NAMES: dict[str, tuple[str, ...]] = {
    "embedding": ("model.embed_tokens.weight",),
    "layers.{i}.attention_norm": (_LAYER + "input_layernorm.weight",),
    "layers.{i}.qkv": (
        _LAYER + "self_attn.q_proj.weight",
        _LAYER + "self_attn.k_proj.weight",
        _LAYER + "self_attn.v_proj.weight",
    ),
    "layers.{i}.attention_output": (_LAYER + "self_attn.o_proj.weight",),
    "layers.{i}.mlp_norm": (_LAYER + "post_attention_layernorm.weight",),
    "layers.{i}.gate_up": (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"),
    "layers.{i}.down": (_LAYER + "mlp.down_proj.weight",),
    "final_norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
}
_EMBEDDING, _HEAD = _NAMES["embedding"][0], _NAMES["head"][0]
_READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
# Buffers that old versions of transformers saved; they follow from rope_theta.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class _Entry:
    """Where a tensor is stored, and what its file's header says about it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class SafetensorsCheckpoint(Checkpoint):
    """An open Hugging Face folder. Its tokenizer files lie in the folder itself.

    Attributes:
      entries: Every stored tensor, by name.
    """

    entries: Mapping[str, _Entry]

    def load(
        self, declared: Mapping[str, ParameterSpec], sharding_of: ShardingOf
    ) -> dict[str, jax.Array]:
        """See Checkpoint. A stored head of a tied model must equal the embedding."""
        files = {entry.file: _open_file(entry.file) for entry in self.entries.values()}

        def read_rows(name: str, rows: slice) -> np.ndarray:
            entry = self.entries[name]
            if entry.dtype not in _READABLE_DTYPES:
                raise CheckpointError(
                    f"{entry.file}: tensor {name} has type {entry.dtype}; "
                    f"readable: {', '.join(_READABLE_DTYPES)}"
                )
            return files[entry.file].get_slice(name)[rows]

        ignored = {name for name in self.entries if name.endswith(_IGNORED_SUFFIX)}
        tied_head = self.config.tie_word_embeddings and _HEAD in self.entries
        stored = StoredTensors(
            source=self.path,
            names=_NAMES,
            shapes={name: entry.shape for name, entry in self.entries.items()},
            ignored=frozenset(ignored | {_HEAD} if tied_head else ignored),
            read_rows=read_rows,
        )
        if tied_head and _EMBEDDING in self.entries:
            check_equal(stored, _HEAD, _EMBEDDING)
        return load_parameters(stored, declared, sharding_of)


def open_safetensors_checkpoint(folder: Path) -> SafetensorsCheckpoint:
    """Opens a Hugging Face folder; raises CheckpointError if it is damaged or not supported."""
    description = read_huggingface_config(folder)
    return SafetensorsCheckpoint(
        path=folder,
        config=description.model,
        eos_token_ids=description.eos_token_ids,
        tokenizer_source=folder,
        entries=_read_entries(folder),
    )


def _read_entries(folder: Path) -> dict[str, _Entry]:
    """Every tensor of the folder's files; with an index, exactly those that it lists."""
    index_path = folder / INDEX_FILE
    weight_map = _read_weight_map(index_path) if index_path.exists() else None
    files = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]
    if not (folder / files[0]).exists():
        raise _no_weights(folder, files[0])
    entries: dict[str, _Entry] = {}
    for file in files:
        for name, entry in _read_header(folder / file).items():
            if name in entries:
                raise CheckpointError(f"{entries[name].file} and {entry.file} both hold {name}")
            if weight_map is not None and weight_map.get(name) != file:
                raise CheckpointError(f"{entry.file}: holds {name}; {INDEX_FILE} does not say so")
            entries[name] = entry
    for name in sorted((weight_map or {}).keys() - entries.keys()):
        raise CheckpointError(f"{index_path}: lists tensor {name}, which is in no file")
    return entries


def _read_weight_map(index_path: Path) -> dict[str, str]:
    """Which file holds each tensor. An index may not point outside of its folder."""
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: weight_map is missing or empty")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index_path}: {name} is in {file!r}; it must be a file of this folder"
            )
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{index_path}: {name} is in {file!r}, no .safetensors file")
    return weight_map


def _read_header(file: Path) -> dict[str, _Entry]:
    with _open_file(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.offset_keys()}
        return {
            name: _Entry(file, tuple(view.get_shape()), view.get_dtype())
            for name, view in slices.items()
        }


def _open_file(file: Path) -> Any:
    try:
        # bfloat16 comes as the NumPy type that importing JAX has registered.
        return safe_open(file, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: not readable as safetensors: {error}") from error


def _no_weights(folder: Path, wanted: str) -> CheckpointError:
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        return CheckpointError(
            f"{folder}: {wanted} is missing, and {pickles[0]} is a pickle, which is never loaded: "
            "opening one runs the code inside; convert the model to safetensors"
        )
    return CheckpointError(f"{folder}: {wanted} is missing")

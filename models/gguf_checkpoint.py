"""GGUF files: every tensor type that the gguf library decodes, dequantised while loading."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from .checkpoint_format import Checkpoint
from .decoder import ParameterSpec
from .gguf_config import ROPE_FREQS, eos_token_ids, read_model_config
from .gguf_file import GgufFile, read_gguf
from .metadata import check_token_ids
from .stored_tensors import ShardingOf, StoredTensors, load_parameters

_LAYER = "blk.{i}."
_NAMES: dict[str, tuple[str, ...]] = {
    "embedding": ("token_embd.weight",),
    "layers.{i}.attention_norm": (_LAYER + "attn_norm.weight",),
    "layers.{i}.qkv": (
        _LAYER + "attn_q.weight",
        _LAYER + "attn_k.weight",
        _LAYER + "attn_v.weight",
    ),
    "layers.{i}.attention_output": (_LAYER + "attn_output.weight",),
    "layers.{i}.mlp_norm": (_LAYER + "ffn_norm.weight",),
    "layers.{i}.gate_up": (_LAYER + "ffn_gate.weight", _LAYER + "ffn_up.weight"),
    "layers.{i}.down": (_LAYER + "ffn_down.weight",),
    "final_norm": ("output_norm.weight",),
    "head": ("output.weight",),
}


@dataclass(frozen=True, kw_only=True)
class GgufCheckpoint(Checkpoint):
    """An open GGUF file. It is its own tokenizer source.

    Attributes:
      file: The file; its tensors are mapped, not read.
    """

    file: GgufFile

    def load(
        self, declared: Mapping[str, ParameterSpec], sharding_of: ShardingOf
    ) -> dict[str, jax.Array]:
        """See Checkpoint."""
        stored = StoredTensors(
            source=self.path,
            names=_NAMES,
            shapes={name: tensor.shape for name, tensor in self.file.tensors.items()},
            ignored=frozenset({ROPE_FREQS}),  # its content is in config.rope_scaling
            read_rows=self._read_rows,
        )
        return load_parameters(stored, declared, sharding_of)

    def _read_rows(self, name: str, rows: slice) -> np.ndarray:
        values = self.file.read_rows(name, rows)
        if name.endswith((".attn_q.weight", ".attn_k.weight")):
            return half_split_rows(values, self.config.head_dim)
        return values


def open_gguf_checkpoint(path: Path) -> GgufCheckpoint:
    """Opens a GGUF file; raises CheckpointError if it is damaged or not supported."""
    file = read_gguf(path)
    config = read_model_config(file)
    end_ids = eos_token_ids(file.metadata)
    check_token_ids(end_ids, config.vocab_size, path)
    return GgufCheckpoint(
        path=path,
        config=config,
        eos_token_ids=end_ids,
        tokenizer_source=path,
        file=file,
    )


def half_split_rows(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders query or key rows from interleaved to half-split rotary pairs.

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; the decoder, as Hugging Face, rotates i with
    i + head_dim / 2. The converter to GGUF interleaved each head's halves; this undoes it.

    Example: rows 0 1 2 3 of a head of four become 0 2 1 3.

    Args:
      rows: Whole heads of `head_dim` rows.
      head_dim: Rows of one head.

    Source: llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute.
    """
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return heads.swapaxes(1, 2).reshape(rows.shape)

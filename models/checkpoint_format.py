"""What every checkpoint format offers once it is open."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from ..configs.model_config import ModelConfig
from .decoder import ParameterSpec
from .stored_tensors import ShardingOf


@dataclass(frozen=True, kw_only=True)
class Checkpoint(abc.ABC):
    """An open checkpoint: its metadata has been read and checked, its parameters not yet.

    Attributes:
      path: The GGUF file, or the folder.
      config: The architecture.
      eos_token_ids: Every id that any place in the checkpoint calls an end of sequence. The
        tokenizer's own configuration may name more.
      tokenizer_source: Where `tokenizer.load_tokenizer` finds the vocabulary: a GGUF file (with or
        without tensors) or a folder.
    """

    path: Path
    config: ModelConfig
    eos_token_ids: frozenset[int]
    tokenizer_source: Path

    @abc.abstractmethod
    def load(
        self, declared: Mapping[str, ParameterSpec], sharding_of: ShardingOf
    ) -> dict[str, jax.Array]:
        """Every declared parameter, in its declared dtype, where `sharding_of` says.

        Beside the loaded parameters, at most two of the largest are in memory at any time.

        Args:
          declared: What the decoder needs: `decoder.declared_parameters(config, dtype)`.
          sharding_of: Where a parameter goes, given its declaration.

        Raises:
          CheckpointError: A tensor is missing, extra, misshapen, damaged or in a type that cannot
            be read; the message names it.
        """

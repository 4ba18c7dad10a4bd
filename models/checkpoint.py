"""Checkpoints of every format that Octavo reads, behind one interface.

    checkpoint = open_checkpoint(path)
    declared = declared_parameters(checkpoint.config, "bfloat16")
    parameters = checkpoint.load(declared, sharding_of)

A GGUF file, a Hugging Face folder or a folder that `octavo convert` wrote; which one shows in the
files, not in their names alone. Loading is strict: every parameter comes from the checkpoint
exactly once and every stored tensor is used, or it is an error that names it.
"""

from pathlib import Path

from ..configs.model_config import ModelConfig
from .checkpoint_format import Checkpoint
from .damage import damage_named
from .gguf_checkpoint import open_gguf_checkpoint
from .huggingface_config import read_huggingface_config
from .metadata import CheckpointError
from .orbax_checkpoint import DESCRIPTION_FILE, open_orbax_checkpoint
from .safetensors_checkpoint import open_safetensors_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint", "read_model_config"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks a checkpoint's metadata.

    Args:
      path: A GGUF file, or a folder with config.json and *.safetensors, or a folder that
        `convert.convert` wrote.

    Raises:
      CheckpointError: There is nothing, or nothing readable, at `path`, or the model needs
        something that is not supported; the message names it.
    """
    with damage_named(path):
        if not path.exists():
            raise CheckpointError(f"{path}: does not exist")
        if path.is_file():
            return open_gguf_checkpoint(path)
        if (path / DESCRIPTION_FILE).exists():
            return open_orbax_checkpoint(path)
        if (path / "config.json").exists():
            return open_safetensors_checkpoint(path)
    raise CheckpointError(
        f"{path}: no checkpoint: it has neither config.json (Hugging Face) nor "
        f"{DESCRIPTION_FILE} (Octavo); a GGUF model is given as the file, not its folder"
    )


def read_model_config(path: Path) -> ModelConfig:
    """What a checkpoint's model is; of a Hugging Face folder, config.json is enough.

    Raises:
      CheckpointError: As open_checkpoint.
    """
    is_folder = path.is_dir() and not (path / DESCRIPTION_FILE).exists()
    if is_folder and (path / "config.json").exists():
        with damage_named(path):
            return read_huggingface_config(path).model
    return open_checkpoint(path).config

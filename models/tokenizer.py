"""Tokenizers of every file format: `Tokenizer`, the interface, and `load_tokenizer`. No JAX."""

from pathlib import Path

from .base_tokenizer import Tokenizer
from .damage import damage_named
from .gguf_tokenizer import load_gguf_tokenizer
from .huggingface_tokenizer import load_huggingface_tokenizer
from .metadata import CheckpointError
from .sentencepiece_tokenizer import load_sentencepiece_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model.

    Args:
      path: A GGUF file, with or without tensors; or a folder with a tokenizer.json or (if it has
        none) a tokenizer.model.

    Raises:
      CheckpointError: Nothing is there, or what is there cannot be used; the message says why.
    """
    with damage_named(path):
        if path.is_file():
            return load_gguf_tokenizer(path)
        if (path / "tokenizer.json").is_file():
            return load_huggingface_tokenizer(path)
        if (path / "tokenizer.model").is_file():
            return load_sentencepiece_tokenizer(path)
    raise CheckpointError(
        f"{path}: no tokenizer here; give a GGUF file, or a folder with tokenizer.json or "
        "tokenizer.model"
    )

"""A GGUF file as a model: opening it, and the architecture that its metadata states. No JAX.

What would change the computation and is not supported is refused by name, never ignored.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; llama.cpp, convert_hf_to_gguf.py.
"""

import math
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderField, dequantize

from ..configs.model_config import ModelConfig, RopeScaling
from .metadata import CheckpointError, Metadata

SUPPORTED_ARCHITECTURES = ("llama",)
MAGIC = b"GGUF"
ROPE_FREQS = "rope_freqs.weight"

# Every key of the architecture that is read, or that may hold the value under which it does
# nothing. Any other is refused: it may be what makes a model differ from Llama.
_READ_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.original_context_length",
    "vocab_size",
}
_NEUTRAL_VALUES: dict[str, object] = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.type": "none",
    "tensor_data_layout": "Meta AI original pth",
    "use_parallel_residual": False,
}


class _Reader(GGUFReader):
    """The library's parser over a plain array.

    It slices the file 700,000 times for a vocabulary of 49,152, and a slice of a memory map costs
    three times one of an array: 2.2 s become 0.7.
    """

    def __setattr__(self, name: str, value: object) -> None:
        """Keeps the map, which the library assigns to `data`, as the array that it is."""
        super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)


def open_gguf(path: Path) -> GGUFReader:
    """Maps a GGUF file and parses its header.

    Raises:
      CheckpointError: It is no GGUF file, is truncated, or is one part of several.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path}: not readable: {error.strerror}") from error
    if magic != MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    try:
        reader = _Reader(path)
    except Exception as error:  # A damaged header fails in the parser as nearly any type.
        raise CheckpointError(
            f"{path}: the GGUF header or data is damaged or truncated: "
            f"{type(error).__name__}: {error}"
        ) from error
    if reader.byte_order == "S":
        raise CheckpointError(f"{path}: made for the other byte order; it must be little-endian")
    return reader


def read_metadata(reader: GGUFReader, path: Path) -> Metadata:
    """Every value but the vocabulary's long arrays, which cost seconds to copy."""
    try:
        values = {
            name: _contents(field)
            for name, field in reader.fields.items()
            if not name.startswith("tokenizer.") or field.types[:1] != [GGUFValueType.ARRAY]
        }
    except (IndexError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: the GGUF header is damaged: {error}") from error
    metadata = Metadata(values, path)
    metadata.require("split.count", 1)
    return metadata


def read_model_config(
    metadata: Metadata, reader: GGUFReader, shapes: dict[str, tuple[int, ...]]
) -> ModelConfig:
    """The architecture. The vocabulary's size and whether embeddings are tied show in the tensors.

    Raises:
      CheckpointError: A value is missing or of the wrong type, or the model needs something that is
        not supported; the message names it.
    """
    source = metadata.source
    architecture = metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(
            f"{source}: general.architecture is {architecture!r}; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    for key in sorted(metadata.values):
        if key.startswith(prefix) and key.removeprefix(prefix) not in _READ_KEYS:
            metadata.require(key, _NEUTRAL_VALUES.get(key.removeprefix(prefix)))

    embedding_shape = shapes.get("token_embd.weight")
    if embedding_shape is None:
        raise CheckpointError(f"{source}: tensor token_embd.weight is missing")
    hidden_size = metadata.integer(prefix + "embedding_length")
    num_q_heads = metadata.integer(prefix + "attention.head_count")
    head_dim = metadata.integer(prefix + "attention.key_length", hidden_size // max(num_q_heads, 1))
    metadata.require(prefix + "attention.value_length", head_dim)
    metadata.require(prefix + "rope.dimension_count", head_dim)
    metadata.require(prefix + "vocab_size", embedding_shape[0])
    rope_theta = _float32(metadata.number(prefix + "rope.freq_base", 10_000.0))
    try:
        return ModelConfig(
            name=source.stem,
            vocab_size=embedding_shape[0],
            hidden_size=hidden_size,
            intermediate_size=metadata.integer(prefix + "feed_forward_length"),
            num_layers=metadata.integer(prefix + "block_count"),
            num_q_heads=num_q_heads,
            num_kv_heads=metadata.integer(prefix + "attention.head_count_kv", num_q_heads),
            head_dim=head_dim,
            max_position=metadata.integer(prefix + "context_length"),
            rope_theta=rope_theta,
            rope_scaling=_rope_scaling(metadata, reader, prefix, head_dim, rope_theta),
            rms_norm_eps=_float32(metadata.number(prefix + "attention.layer_norm_rms_epsilon")),
            tie_word_embeddings="output.weight" not in shapes,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error


def copy_without_tensors(source: Path, destination: Path) -> None:
    """Writes a GGUF file that holds the metadata of another, the vocabulary included, alone."""
    reader = open_gguf(source)
    architecture = str(read_metadata(reader, source).get("general.architecture"))
    writer = GGUFWriter(destination, architecture)
    for name, field in reader.fields.items():
        kind = field.types[0]
        if name.startswith("GGUF.") or name == "general.architecture" or not field.data:
            continue  # the writer's own, or an empty array, which it cannot write
        if kind == GGUFValueType.ARRAY:
            writer.add_key_value(name, _raw_items(field), kind, sub_type=field.types[-1])
        else:
            writer.add_key_value(name, _raw_items(field)[0], kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _raw_items(field: ReaderField) -> list[object]:
    """A field's values; strings as bytes, as a vocabulary may hold ones that are no UTF-8."""
    if field.types[-1] == GGUFValueType.STRING:
        return [field.parts[i].tobytes() for i in field.data]
    return [field.parts[i].tolist()[0] for i in field.data]


def _contents(field: ReaderField) -> object:
    return field.contents()


def _float32(value: float) -> float:
    """The shortest decimal for a value that was stored as float32: 1e-05, not 9.9999997e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(
    metadata: Metadata, reader: GGUFReader, prefix: str, head_dim: int, rope_theta: float
) -> RopeScaling | None:
    """Llama 3's stretch, recovered from the divisors that the converter stored for it.

    The file holds one divisor for each rotary frequency and not the four numbers they came from.
    Of those, Meta's models vary only the factor, which is the largest divisor. That the four
    numbers give the stored divisors is checked, so another scheme is refused.
    """
    tensor = next((t for t in reader.tensors if t.name == ROPE_FREQS), None)
    if tensor is None:
        return None
    divisors = dequantize(tensor.data, tensor.tensor_type).ravel()
    if divisors.shape == (head_dim // 2,):
        if np.all(divisors == 1):
            return None
        scaling = RopeScaling(
            factor=_float32(float(divisors.max())),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=metadata.integer(
                prefix + "rope.scaling.original_context_length", 8192
            ),
        )
        if np.allclose(divisors, _llama3_divisors(scaling, head_dim, rope_theta), rtol=1e-4):
            return scaling
    raise CheckpointError(
        f"{metadata.source}: tensor {ROPE_FREQS} does not hold Llama 3's rotary divisors for "
        f"head_dim {head_dim} (low factor 1, high factor 4); other schemes are not supported"
    )


def _llama3_divisors(scaling: RopeScaling, head_dim: int, rope_theta: float) -> list[float]:
    """What each rotary frequency is divided by. Source: llama.cpp, generate_extra_tensors."""
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * rope_theta ** (2 * i / head_dim)
        turns = scaling.original_max_position / wavelength
        share = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        share = min(max(share, 0.0), 1.0)
        divisors.append(1 / ((1 - share) / scaling.factor + share))
    return divisors

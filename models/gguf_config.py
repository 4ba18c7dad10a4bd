"""What a GGUF file states about its model: the architecture, and which ids end an output. No JAX.

What would change the computation and is not supported is refused by name, never ignored.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; llama.cpp, convert_hf_to_gguf.py.
"""

import math

import numpy as np

from ..configs.model_config import ModelConfig, RopeScaling
from .gguf_file import GgufFile
from .metadata import CheckpointError, Metadata

SUPPORTED_ARCHITECTURES = ("llama",)
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


def read_model_config(file: GgufFile) -> ModelConfig:
    """The architecture. The vocabulary's size and whether embeddings are tied show in the tensors.

    Raises:
      CheckpointError: A value is missing or of the wrong type, or the model needs something that is
        not supported; the message names it.
    """
    metadata, source = file.metadata, file.metadata.source
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

    if metadata.get("split.count") != 0:  # what llama.cpp writes into a file it merged
        metadata.require("split.count", 1)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{source}: tensor token_embd.weight is missing")
    vocab_size = embedding.shape[0]
    hidden_size = metadata.integer(prefix + "embedding_length")
    num_q_heads = metadata.integer(prefix + "attention.head_count")
    head_dim = metadata.integer(prefix + "attention.key_length", hidden_size // max(num_q_heads, 1))
    metadata.require(prefix + "attention.value_length", head_dim)
    metadata.require(prefix + "rope.dimension_count", head_dim)
    metadata.require(prefix + "vocab_size", vocab_size)
    rope_theta = _float32(metadata.number(prefix + "rope.freq_base", 10_000.0))
    try:
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=metadata.integer(prefix + "feed_forward_length"),
            num_layers=metadata.integer(prefix + "block_count"),
            num_q_heads=num_q_heads,
            num_kv_heads=metadata.integer(prefix + "attention.head_count_kv", num_q_heads),
            head_dim=head_dim,
            max_position=metadata.integer(prefix + "context_length"),
            rope_theta=rope_theta,
            rope_scaling=_rope_scaling(file, prefix, head_dim, rope_theta),
            rms_norm_eps=_float32(metadata.number(prefix + "attention.layer_norm_rms_epsilon")),
            tie_word_embeddings="output.weight" not in file.tensors,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error


def eos_token_ids(metadata: Metadata) -> frozenset[int]:
    """Every id that the file calls an end: of sequence, of turn or of message.

    Raises:
      CheckpointError: A value is no token id.
    """
    keys = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
    return frozenset[int]().union(*map(metadata.token_ids, keys))


def _float32(value: float) -> float:
    """The shortest decimal for a value that was stored as float32: 1e-05, not 9.9999997e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(
    file: GgufFile, prefix: str, head_dim: int, rope_theta: float
) -> RopeScaling | None:
    """Llama 3's stretch, recovered from the divisors that the converter stored for it.

    The file holds one divisor for each rotary frequency and not the four numbers they came from.
    Of those, Meta's models vary only the factor, which is the largest divisor. That the four
    numbers give the stored divisors is checked, so another scheme is refused.
    """
    if ROPE_FREQS not in file.tensors or not rope_theta > 0:
        return None  # the model's config refuses such a base by name
    divisors = file.read_rows(ROPE_FREQS, slice(None)).ravel()
    if divisors.shape == (head_dim // 2,):
        if np.all(divisors == 1):
            return None
        scaling = RopeScaling(
            factor=_float32(float(divisors.max())),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=file.metadata.integer(
                prefix + "rope.scaling.original_context_length", 8192
            ),
        )
        if np.allclose(divisors, _llama3_divisors(scaling, head_dim, rope_theta), rtol=1e-4):
            return scaling
    raise CheckpointError(
        f"{file.metadata.source}: tensor {ROPE_FREQS} does not hold Llama 3's rotary divisors for "
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

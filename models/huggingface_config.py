"""config.json and generation_config.json of a Hugging Face folder, read. No JAX.

What would change the computation and is not supported is refused by name, never ignored.
Source: transformers, `LlamaConfig` (defaults included) and `PretrainedConfig`.
"""

from dataclasses import dataclass
from pathlib import Path

from ..configs.model_config import ModelConfig, RopeScaling
from .metadata import CheckpointError, Metadata, check_token_ids, read_json

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)

# Settings that the decoder does not have, and the one value under which they do nothing.
_NEUTRAL_VALUES: dict[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "sliding_window": None,
}
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LLAMA3_KEYS = {
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """What a Hugging Face folder says about its model.

    Attributes:
      model: The architecture.
      eos_token_ids: Every id that either file calls an end of sequence.
    """

    model: ModelConfig
    eos_token_ids: frozenset[int]


def read_huggingface_config(folder: Path) -> HuggingFaceConfig:
    """Reads config.json and, where present, generation_config.json.

    Raises:
      CheckpointError: A file is unreadable, a value is missing or of the wrong type, or the model
        needs something that is not supported; the message names it.
    """
    top = read_json(folder / "config.json")
    text = _text_config(top)
    _check_supported(top, text)

    hidden_size = text.integer("hidden_size")
    num_q_heads = text.integer("num_attention_heads")
    try:
        rope_theta, rope_scaling = _rope(text)
        model = ModelConfig(
            vocab_size=text.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=text.integer("intermediate_size"),
            num_layers=text.integer("num_hidden_layers"),
            num_q_heads=num_q_heads,
            num_kv_heads=text.integer("num_key_value_heads", num_q_heads),
            head_dim=text.integer("head_dim", hidden_size // max(num_q_heads, 1)),
            max_position=text.integer("max_position_embeddings", 2048),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rms_norm_eps=text.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=_tie_word_embeddings(top, text),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{top.source}: {error}") from error

    eos_token_ids = top.token_ids("eos_token_id") | text.token_ids("eos_token_id")
    generation = read_json(folder / "generation_config.json", is_optional=True)
    eos_token_ids |= generation.token_ids("eos_token_id")
    check_token_ids(eos_token_ids, model.vocab_size, top.source)
    return HuggingFaceConfig(model=model, eos_token_ids=eos_token_ids)


def _text_config(top: Metadata) -> Metadata:
    """The part that describes the decoder: `text_config` where there is one, else everything."""
    nested = top.get("text_config")
    if nested is None:
        return top
    if not isinstance(nested, dict):
        raise top.error("text_config", "an object")
    return Metadata(nested, top.source)


def _check_supported(top: Metadata, text: Metadata) -> None:
    architectures = top.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(
            f"{top.source}: architectures is {architectures!r}; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    for part in (top, text):
        for key, value in _NEUTRAL_VALUES.items():
            part.require(key, value)


def _tie_word_embeddings(top: Metadata, text: Metadata) -> bool:
    """The flag, wherever it stands; both places must agree, as engines differ in which one wins."""
    tied = text.boolean("tie_word_embeddings", top.boolean("tie_word_embeddings", False))
    top.require("tie_word_embeddings", tied)
    return tied


def _rope(text: Metadata) -> tuple[float, RopeScaling | None]:
    """Base and stretch of the rotary embedding.

    transformers 4 writes `rope_theta` and `rope_scaling` side by side, 5 one `rope_parameters`
    that holds both.
    """
    stated = [key for key in ("rope_parameters", "rope_scaling") if text.get(key) is not None]
    if not stated:
        return text.number("rope_theta", 10_000.0), None
    nested = text.get(stated[0])
    if not isinstance(nested, dict):
        raise text.error(stated[0], "an object")
    if len(stated) == 2:
        text.require("rope_scaling", nested)
    rope = Metadata(nested, text.source)
    rope_theta = rope.number("rope_theta", text.number("rope_theta", 10_000.0))
    text.require("rope_theta", rope_theta)
    rope.require("partial_rotary_factor", 1.0)

    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ("default", "llama3"):
        raise CheckpointError(
            f"{text.source}: {stated[0]} has rope_type {rope_type!r}; supported: default, llama3"
        )
    known = _ROPE_KEYS | (_LLAMA3_KEYS if rope_type == "llama3" else set())
    for key in sorted(nested.keys() - known):
        rope.require(key, None)
    if rope_type == "default":
        return rope_theta, None
    return rope_theta, RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.integer("original_max_position_embeddings"),
    )

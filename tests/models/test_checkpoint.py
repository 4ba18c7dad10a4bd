"""Every format brings the same parameters, strictly; each has a file for cases of its own."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from octavo.configs.model_config import ModelConfig
from octavo.models.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from octavo.models.convert import convert
from octavo.models.decoder import ParameterSpec, declared_parameters
from octavo.models.stored_tensors import BLOCK_ROWS
from tests.models.tiny_checkpoints import (
    EOS_TOKEN_ID,
    Arrays,
    decoder_parameters,
    random_tensors,
    tiny_config,
    write_gguf,
    write_huggingface,
)

Writer = Callable[[Path, ModelConfig, Arrays], Path]


def one_device(_: ParameterSpec) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def load(checkpoint: Checkpoint, dtype: str = "float32") -> dict[str, jax.Array]:
    return checkpoint.load(declared_parameters(checkpoint.config, dtype), one_device)


def assert_equal(parameters: dict[str, jax.Array], expected: Arrays, dtype: str) -> None:
    """Same paths, same bits; matrices in `dtype`, norms in float32."""
    assert parameters.keys() == expected.keys()
    for path, value in expected.items():
        wanted = np.float32 if path.endswith("norm") else np.dtype(dtype)
        assert parameters[path].dtype == wanted, path
        np.testing.assert_array_equal(np.asarray(parameters[path]), value.astype(wanted), path)


def gguf(path: Path, config: ModelConfig, tensors: Arrays) -> Path:
    return write_gguf(path.with_suffix(".gguf"), config, tensors)


def orbax(path: Path, config: ModelConfig, tensors: Arrays) -> Path:
    source = write_huggingface(path.with_name("source"), config, tensors)
    convert(source, path, "float32")
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("write", [gguf, write_huggingface, orbax])
def test_every_format_brings_the_same_parameters(
    write: Writer, tied: bool, dtype: str, tmp_path: Path
) -> None:
    """Breaks when a tensor lands in the wrong place, is not un-permuted, or changes on the way."""
    config = tiny_config(tie_word_embeddings=tied)
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write(tmp_path / "tiny", config, tensors))
    assert checkpoint.eos_token_ids == {EOS_TOKEN_ID}
    assert checkpoint.tokenizer_source.exists()
    assert checkpoint.config == config
    assert_equal(load(checkpoint, dtype), decoder_parameters(config, tensors), dtype)


def test_rounding_to_bfloat16_is_to_nearest_even(tmp_path: Path) -> None:
    """Both ways of conversion, NumPy's and Orbax's, round alike."""
    config = tiny_config()
    rng = np.random.default_rng(1)
    tensors = {
        name: rng.normal(0, 1, value.shape).astype(np.float32)
        for name, value in random_tensors(config).items()
    }
    folder = write_huggingface(tmp_path / "wide", config, tensors, dtype=np.float32)
    convert(folder, tmp_path / "native", "float32")
    for path in (folder, tmp_path / "native"):
        parameters = load(open_checkpoint(path), "bfloat16")
        assert_equal(parameters, decoder_parameters(config, tensors), "bfloat16")


def test_large_tensors_are_copied_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks when a block is left out or shifted: the vocabulary is no multiple of the block."""
    monkeypatch.setattr("octavo.models.stored_tensors.BLOCK_ROWS", 7)
    config = tiny_config()
    tensors = random_tensors(config)
    for path in (
        write_gguf(tmp_path / "tiny.gguf", config, tensors),
        write_huggingface(tmp_path / "tiny", config, tensors),
    ):
        parameters = load(open_checkpoint(path))
        assert_equal(parameters, decoder_parameters(config, tensors), "float32")


def quantised_gguf(path: Path, config: ModelConfig, tensors: Arrays) -> Path:
    return write_gguf(
        path.with_suffix(".gguf"), config, tensors, matrix_type=GGMLQuantizationType.Q8_0
    )


@pytest.mark.parametrize("write", [quantised_gguf, write_huggingface])
def test_memory_stays_below_one_copy_and_some_blocks(write: Writer, tmp_path: Path) -> None:
    """Breaks when a tensor is read or decoded whole, or parameters exist twice.

    Counts NumPy's memory, from which JAX borrows the loaded parameters on the CPU.
    """
    config = tiny_config(vocab_size=40_000)
    checkpoint = open_checkpoint(write(tmp_path / "tiny", config, random_tensors(config)))
    declared = declared_parameters(config, "bfloat16")
    tracemalloc.start()
    parameters = checkpoint.load(declared, one_device)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    loaded_bytes = sum(array.nbytes for array in parameters.values())
    largest_bytes = max(array.nbytes for array in parameters.values())
    block_bytes = BLOCK_ROWS * config.hidden_size * 4
    assert largest_bytes > 4 * block_bytes
    assert peak_bytes < loaded_bytes + 4 * block_bytes


def test_another_declaration_than_the_checkpoint_s_is_refused(tmp_path: Path) -> None:
    """A parameter that the format cannot bring is an error, not an array of whatever."""
    config = tiny_config()
    path = write_huggingface(tmp_path / "tiny", config, random_tensors(config))
    spec = ParameterSpec((2,), np.dtype(ml_dtypes.bfloat16), (None,))
    declared = declared_parameters(config, "float32") | {"layers.1.router": spec}
    with pytest.raises(CheckpointError, match=r"no tensor for parameter layers\.1\.router"):
        open_checkpoint(path).load(declared, one_device)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no checkpoint: it has neither config\.json"):
        open_checkpoint(tmp_path)
    text = tmp_path / "notes.gguf"
    text.write_text("notes")
    with pytest.raises(CheckpointError, match=r"notes\.gguf: not a GGUF file: .*b'note'"):
        open_checkpoint(text)

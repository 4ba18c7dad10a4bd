"""GGUF files: rotary order, tensor types, metadata that is refused, damage."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from octavo.configs.model_config import ModelConfig, RopeScaling
from octavo.models.checkpoint import CheckpointError, open_checkpoint
from octavo.models.decoder import ParameterSpec, declared_parameters
from octavo.models.gguf_checkpoint import half_split_rows
from octavo.models.gguf_file import read_gguf
from octavo.models.layers import rope_frequencies
from tests.models.tiny_checkpoints import (
    Arrays,
    decoder_parameters,
    interleave,
    random_tensors,
    tiny_config,
    write_gguf,
)

CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG)


def one_device(_: ParameterSpec) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def load(path: Path) -> Arrays:
    checkpoint = open_checkpoint(path)
    declared = declared_parameters(checkpoint.config, "float32")
    return {name: np.asarray(x) for name, x in checkpoint.load(declared, one_device).items()}


def rotate(heads: np.ndarray, position: int, theta: float, *, interleaved: bool) -> np.ndarray:
    """Rotary embedding of [heads, head_dim] as complex multiplication, in either convention."""
    half = heads.shape[-1] // 2
    turn = np.exp(1j * position * theta ** (-np.arange(half) / half))
    if interleaved:  # llama.cpp, LLAMA_ROPE_TYPE_NORM: pairs (0, 1), (2, 3), ...
        turned = (heads[..., 0::2] + 1j * heads[..., 1::2]) * turn
        return np.stack([turned.real, turned.imag], -1).reshape(heads.shape)
    turned = (heads[..., :half] + 1j * heads[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], -1)


def test_attention_scores_are_those_of_the_stored_weights(tmp_path: Path) -> None:
    """Stored rows under llama.cpp's rotation and loaded rows under ours give the same q k^T.

    Breaks when rows are not un-permuted, are permuted twice, or across heads.
    """
    path = write_gguf(tmp_path / "tiny.gguf", CONFIG, TENSORS)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    qkv = load(path)["layers.1.qkv"]
    x, y = np.random.default_rng(2).normal(0, 1, (2, CONFIG.hidden_size))
    head_dim, group = CONFIG.head_dim, CONFIG.num_q_heads // CONFIG.num_kv_heads
    theta = CONFIG.rope_theta

    q = (stored["blk.1.attn_q.weight"] @ x).reshape(-1, head_dim)
    k = (stored["blk.1.attn_k.weight"] @ y).reshape(-1, head_dim)
    q = rotate(q, 5, theta, interleaved=True).reshape(-1, group, head_dim)
    expected = np.einsum("kgh,kh->kg", q, rotate(k, 2, theta, interleaved=True))

    q = rotate(qkv[:, :group] @ x, 5, theta, interleaved=False)
    k = rotate(qkv[:, group] @ y, 2, theta, interleaved=False)
    np.testing.assert_allclose(np.einsum("kgh,kh->kg", q, k), expected, atol=1e-5)


def test_half_split_rows_undoes_the_converter() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = interleave(name, TENSORS[name], CONFIG)
    assert not np.array_equal(stored, TENSORS[name])
    np.testing.assert_array_equal(half_split_rows(stored, CONFIG.head_dim), TENSORS[name])
    rows = np.array([[0], [1], [2], [3]])
    assert half_split_rows(rows, 4).ravel().tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("matrix_type", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_matrices_are_decoded(matrix_type: str, tmp_path: Path) -> None:
    """Every parameter equals the whole tensor dequantised at once and put in place by the test."""
    kind = gguf.GGMLQuantizationType[matrix_type]
    config = tiny_config(num_q_heads=8, num_kv_heads=2)  # rows of 64 and 96: whole blocks
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "tiny.gguf", config, tensors, matrix_type=kind)
    rounded = {
        # Rows are quantised alone, so that permuting them changes nothing.
        name: value if value.ndim == 1 else gguf.dequantize(gguf.quantize(value, kind), kind)
        for name, value in tensors.items()
    }
    expected = decoder_parameters(config, rounded)
    loaded = load(path)
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(loaded[name], value, name)


def test_a_type_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    integers = TENSORS | {"model.norm.weight": np.ones(CONFIG.hidden_size, np.int32)}
    write_gguf(path, CONFIG, integers)
    with pytest.raises(CheckpointError, match=r"tensor output_norm\.weight has type I32"):
        load(path)


@pytest.mark.parametrize("count", [0, 1])
def test_a_file_that_was_split_once_and_is_whole(count: int, tmp_path: Path) -> None:
    """llama.cpp writes 0 into what it merged from parts."""
    load(write_gguf(tmp_path / "tiny.gguf", CONFIG, TENSORS, changes={"split.count": count}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, r"architecture is 'gemma3'; supported: llama"),
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8, .* only 0 is"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type is 'yarn'"),
        ({"llama.attention.sliding_window": 64}, r"llama\.attention\.sliding_window is 64"),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale is 0\.5"),
        ({"llama.attention.value_length": 16}, r"value_length is 16, .* only 8 is"),
        ({"llama.rope.dimension_count": 4}, r"dimension_count is 4, .* only 8 is"),
        ({"llama.vocab_size": 100}, r"vocab_size is 100, .* only 320 is"),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.block_count": "two"}, r"llama\.block_count is 'two'; it must be an integer"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv is \[2, 1\]"),
        ({"llama.attention.head_count_kv": 3}, r"num_q_heads is 4; .* multiple of num_kv_heads, 3"),
        ({"tokenizer.ggml.eos_token_id": 320}, r"token id 320 is out of range"),
        ({"split.count": 2}, r"split\.count is 2"),
    ],
)
def test_what_is_not_supported_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Breaks when a setting that changes the computation is ignored."""
    path = write_gguf(tmp_path / "tiny.gguf", CONFIG, TENSORS, changes=changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_defaults_are_those_of_the_format(tmp_path: Path) -> None:
    """Keys that old converters left out."""
    config = tiny_config(num_q_heads=8, num_kv_heads=8)
    left_out = (
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.freq_base",
        "rope.dimension_count",
        "vocab_size",
    )
    changes = dict.fromkeys(f"llama.{key}" for key in left_out)
    path = write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config), changes=changes)
    assert open_checkpoint(path).config == config


def test_every_kind_of_end_id_counts(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.eot_token_id": 300, "tokenizer.ggml.eom_token_id": 301}
    path = write_gguf(tmp_path / "tiny.gguf", CONFIG, TENSORS, changes=changes)
    assert open_checkpoint(path).eos_token_ids == {258, 300, 301}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"tensor blk\.1\.ffn_up\.weight is missing"),
        ({"model.embed_tokens.weight": None}, r"tensor token_embd\.weight is missing"),
        (
            {"model.layers.0.self_attn.k_proj.weight": np.ones((32, 64), np.float32)},
            r"blk\.0\.attn_k\.weight has shape \[32, 64\]; the model needs \[16, 64\]",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)},
            r"no place for tensor blk\.0\.attn_q\.bias",
        ),
        (
            {"model.layers.2.mlp.up_proj.weight": np.ones((96, 64), np.float32)},
            r"no place for tensor blk\.2\.ffn_up\.weight",
        ),
    ],
)
def test_tensors_must_be_exactly_the_model_s(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tensors = {name: value for name, value in (TENSORS | change).items() if value is not None}
    path = write_gguf(tmp_path / "tiny.gguf", CONFIG, tensors)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def llama3_divisors(config: ModelConfig) -> np.ndarray:
    """What the converter stores: the plain frequencies over the stretched ones."""
    plain = rope_frequencies(tiny_config(rope_theta=config.rope_theta, head_dim=config.head_dim))
    return np.asarray(plain / rope_frequencies(config), np.float32)


def test_llama3_rotary_divisors_become_the_scaling(tmp_path: Path) -> None:
    """Breaks when rope_freqs.weight is ignored: long prompts would drift without any error."""
    scaling = RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    config = tiny_config(head_dim=64, rope_theta=500_000.0, rope_scaling=scaling)
    divisors = llama3_divisors(config)
    assert 1 < divisors[len(divisors) // 2 - 1] < 32  # one in the blend between the two ends
    path = tmp_path / "tiny.gguf"
    tensors = random_tensors(config)
    write_gguf(path, config, tensors, extra={"rope_freqs.weight": divisors})
    assert open_checkpoint(path).config.rope_scaling == scaling
    load(path)
    ones = {"rope_freqs.weight": np.ones_like(divisors)}
    write_gguf(path, config, tensors, extra=ones)
    assert open_checkpoint(path).config.rope_scaling is None


@pytest.mark.parametrize("divisors", [np.linspace(1, 8, 32), np.full(32, 2.0), np.ones(16)])
def test_other_rotary_divisors_are_refused(divisors: np.ndarray, tmp_path: Path) -> None:
    config = tiny_config(head_dim=64)
    extra = {"rope_freqs.weight": divisors.astype(np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config), extra=extra)
    with pytest.raises(CheckpointError, match=r"tensor rope_freqs\.weight does not hold"):
        open_checkpoint(path)


@pytest.mark.parametrize("kept", [0, 3, 4, 12, 20, 40, 1000, 0.3, 0.9, 0.999])
def test_truncation_is_named(kept: float, tmp_path: Path) -> None:
    """Cut in the magic, the counts, the metadata and the data."""
    path = write_gguf(tmp_path / "tiny.gguf", CONFIG, TENSORS)
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: .*(damaged|not a GGUF file)"):
        open_checkpoint(path)


def test_the_vocabulary_survives_without_tensors(tmp_path: Path) -> None:
    """All metadata in every type, and no weights: the gguf package reads the same from both."""
    source, copy = tmp_path / "tiny.gguf", tmp_path / "copy.gguf"
    write_gguf(source, CONFIG, TENSORS, changes={"empty": ""})
    copy.write_bytes(read_gguf(source).without_tensors())
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(copy)
    assert len(before.tensors) == len(TENSORS)
    assert after.tensors == []
    assert after.fields.keys() == before.fields.keys()
    for name, field in before.fields.items():
        if name != "GGUF.tensor_count":
            copied = after.fields[name]
            assert copied.types == field.types, name
            values = [field.parts[i].tobytes() for i in field.data]
            assert [copied.parts[i].tobytes() for i in copied.data] == values, name
    assert read_gguf(copy).metadata.values == read_gguf(source).metadata.values
    shutil.rmtree(tmp_path)  # an open map must not keep the files from being removed


def test_the_default_model_loads_strictly(default_model_path: Path) -> None:
    """A real file: mixed Q8_0, Q4_1 and F32 tensors, tied embeddings."""
    checkpoint = open_checkpoint(default_model_path)
    config = checkpoint.config
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.head_dim, config.rope_theta, config.rms_norm_eps) == (64, 100_000.0, 1e-5)
    assert config.tie_word_embeddings
    assert checkpoint.eos_token_ids == {2}
    declared = declared_parameters(config, "bfloat16")
    parameters = checkpoint.load(declared, one_device)
    assert parameters.keys() == declared.keys()
    finite = jax.numpy.isfinite(parameters["layers.29.down"].astype("float32"))
    assert finite.all()

"""Hugging Face folders: tied embeddings, shards, config.json that is refused, damage."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.configs.model_config import RopeScaling
from octavo.models.checkpoint import CheckpointError, open_checkpoint
from octavo.models.decoder import ParameterSpec, declared_parameters
from tests.models.tiny_checkpoints import (
    Arrays,
    decoder_parameters,
    huggingface_config,
    random_tensors,
    tiny_config,
    write_huggingface,
)

CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"


def one_device(_: ParameterSpec) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def load(path: Path) -> Arrays:
    checkpoint = open_checkpoint(path)
    declared = declared_parameters(checkpoint.config, "float32")
    return {name: np.asarray(x) for name, x in checkpoint.load(declared, one_device).items()}


def flag(tied: bool, *, nested: bool) -> dict[str, Any]:
    """Changes to config.json that state the flag at the top, or in text_config and only there."""
    if not nested:
        return {"tie_word_embeddings": tied}
    text = huggingface_config(CONFIG) | {"tie_word_embeddings": tied}
    return {"tie_word_embeddings": None, "text_config": text}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("stored", ["absent", "equal", "different"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings(tied: bool, stored: str, nested: bool, tmp_path: Path) -> None:
    """Failure case 8.1: a head is never left out, made up, or thrown away without a word."""
    head = random_tensors(tiny_config(tie_word_embeddings=False), seed=9)[HEAD]
    tensors = TENSORS | {"equal": {HEAD: TENSORS[EMBEDDING]}, "different": {HEAD: head}}.get(
        stored, {}
    )
    changes = flag(tied, nested=nested)
    path = write_huggingface(tmp_path / "tiny", CONFIG, tensors, changes=changes)
    if tied and stored == "different":
        with pytest.raises(CheckpointError, match=r"tied, yet lm_head\.weight differs"):
            load(path)
    elif not tied and stored == "absent":
        with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
            load(path)
    else:
        parameters = load(path)
        assert ("head" in parameters) == (not tied)
        if not tied:
            np.testing.assert_array_equal(parameters["head"], tensors[HEAD])
        np.testing.assert_array_equal(parameters["embedding"], TENSORS[EMBEDDING])


def test_two_places_must_agree_on_the_flag(tmp_path: Path) -> None:
    changes = flag(True, nested=True) | {"tie_word_embeddings": False}
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS, changes=changes)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is False"):
        open_checkpoint(path)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_float_type_is_read(dtype: Any, tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS, dtype=dtype)
    expected = {name: value.astype(dtype) for name, value in TENSORS.items()}
    for name, value in decoder_parameters(CONFIG, expected).items():
        np.testing.assert_array_equal(load(path)[name], value.astype(np.float32), name)


def test_other_types_are_named(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS, dtype=np.int32)
    with pytest.raises(CheckpointError, match=r"tensor .*\.weight has type I32; readable: F64"):
        load(path)


def test_several_files_load_as_one(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS, num_files=3)
    for name, value in decoder_parameters(CONFIG, TENSORS).items():
        np.testing.assert_array_equal(load(path)[name], value, name)


def break_index(folder: Path, change: dict[str, Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= change
    (folder / INDEX).write_text(json.dumps(index))


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS, num_files=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: .*No such file"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({EMBEDDING: "../x.safetensors"}, r"it must be a file of this folder"),
        ({EMBEDDING: "/x.safetensors"}, r"it must be a file of this folder"),
        ({EMBEDDING: 3}, r"is in 3; it must be a file of this folder"),
        ({EMBEDDING: "x.bin"}, r"'x\.bin', no \.safetensors file"),
        ({"more": "model-00001-of-00002.safetensors"}, r"lists tensor more, which is in no file"),
        ({EMBEDDING: "model-00002-of-00002.safetensors"}, r"holds model\.embed_tokens\.weight"),
    ],
)
def test_the_index_must_describe_the_files(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS, num_files=2)
    break_index(path, change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"tensor model\.norm\.weight is missing"),
        ({EMBEDDING: None}, r"tensor model\.embed_tokens\.weight is missing"),
        (
            {"model.layers.1.mlp.down_proj.weight": np.ones((96, 64), np.float32)},
            r"down_proj\.weight has shape \[96, 64\]; the model needs \[64, 96\]",
        ),
        (
            {EMBEDDING: np.ones((319, 64), np.float32)},
            r"embed_tokens\.weight has shape \[319, 64\]; the model needs \[320, 64\]",
        ),
        (
            {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)},
            r"no place for tensor model\.layers\.0\.self_attn\.q_norm\.weight",
        ),
    ],
)
def test_tensors_must_be_exactly_the_model_s(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tensors = {name: value for name, value in (TENSORS | change).items() if value is not None}
    path = write_huggingface(tmp_path / "tiny", CONFIG, tensors)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_a_tied_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = TENSORS | {HEAD: TENSORS[EMBEDDING][:-1]}
    with pytest.raises(CheckpointError, match=r"tied, yet lm_head\.weight differs"):
        load(write_huggingface(tmp_path / "tiny", CONFIG, tensors))


def test_buffers_of_old_versions_are_ignored(tmp_path: Path) -> None:
    """inv_freq follows from rope_theta; transformers before 4.31 saved it."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = TENSORS | {name: np.ones(4, np.float32)}
    assert "embedding" in load(write_huggingface(tmp_path / "tiny", CONFIG, tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Gemma3ForCausalLM"]},
            r"architectures is \['Gemma3ForCausalLM'\]; supported: LlamaForCausalLM",
        ),
        ({"architectures": None}, r"architectures is None; supported: LlamaForCausalLM"),
        ({"attention_bias": True}, r"attention_bias is True, .* only False is"),
        ({"mlp_bias": True}, r"mlp_bias is True, .* only False is"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', .* only 'silu' is"),
        ({"sliding_window": 4096}, r"sliding_window is 4096, .* only leaving it out is"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config is \{'bits': 4\}"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, r"rope_type 'linear'; supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"low_freq_factor is missing"),
        ({"rope_parameters": {"rope_type": "default", "mscale": 2}}, r"mscale is 2"),
        ({"rope_parameters": {"rope_theta": 5.0}}, r"rope_theta is 10000\.0, .* only 5\.0 is"),
        ({"rope_scaling": "llama3"}, r"rope_scaling is 'llama3'; it must be an object"),
        ({"hidden_size": None}, r"hidden_size is missing; it must be an integer"),
        ({"hidden_size": "64"}, r"hidden_size is '64'; it must be an integer"),
        ({"hidden_size": True}, r"hidden_size is True; it must be an integer"),
        ({"num_hidden_layers": 0}, r"num_layers is 0"),
        ({"num_attention_heads": 0, "num_key_value_heads": 0, "head_dim": None}, r" is 0"),
        ({"num_key_value_heads": 3}, r"multiple of num_kv_heads, 3"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes'"),
        ({"eos_token_id": [2, "x"]}, r"eos_token_id is \[2, 'x'\]"),
        ({"eos_token_id": 320}, r"token id 320 is out of range; the vocabulary is \[0, 320\)"),
        ({"text_config": 3}, r"text_config is 3; it must be an object"),
    ],
)
def test_what_is_not_supported_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Breaks when a setting that changes the computation is ignored."""
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS, changes=changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": LLAMA3, "rope_scaling": LLAMA3},
    ],
)
def test_rotary_settings_of_transformers_4_and_5(changes: dict[str, Any], tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS, changes=changes)
    config = open_checkpoint(path).config
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "default", "type": None}])
def test_default_rotary_type_is_no_scaling(rope: dict[str, Any], tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS, changes={"rope_scaling": rope})
    assert open_checkpoint(path).config == CONFIG


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config = tiny_config(
        num_q_heads=8, num_kv_heads=8, rms_norm_eps=1e-6, max_position=2048, num_layers=1
    )
    left_out = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
    changes = dict.fromkeys((*left_out, "max_position_embeddings"))
    path = write_huggingface(tmp_path / "tiny", config, random_tensors(config), changes=changes)
    assert open_checkpoint(path).config == config


def test_end_ids_of_both_files_count(tmp_path: Path) -> None:
    """Failure cases 2: chat models name <|eot_id|> in generation_config.json alone."""
    path = write_huggingface(
        tmp_path / "list",
        CONFIG,
        TENSORS,
        changes={"eos_token_id": [258, 300]},
        generation_config={"eos_token_id": 301},
    )
    assert open_checkpoint(path).eos_token_ids == {258, 300, 301}
    changes: dict[str, Any] = {"eos_token_id": None}
    generation = {"eos_token_id": [258, 301]}
    path = write_huggingface(
        tmp_path / "one", CONFIG, TENSORS, changes=changes, generation_config=generation
    )
    assert open_checkpoint(path).eos_token_ids == {258, 301}
    path = write_huggingface(tmp_path / "none", CONFIG, TENSORS, changes=changes)
    assert open_checkpoint(path).eos_token_ids == frozenset()


@pytest.mark.parametrize("content", ["", "[1]", '{"a": ', '{"a": \x00}'])
def test_unreadable_json_is_named(content: str, tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS)
    (path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: (not readable as JSON|holds a list)"):
        open_checkpoint(path)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncation_is_named(kept: float, tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS)
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not readable as safetensors"):
        open_checkpoint(path)


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle, .* never loaded"):
        open_checkpoint(path)
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"tiny: model\.safetensors is missing"):
        open_checkpoint(path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS, num_files=2)
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    second = "model-00002-of-00002.safetensors"
    names = {name for name, file in weight_map.items() if file == second}
    save_file({name: TENSORS[name] for name in names | {EMBEDDING}}, path / second)
    with pytest.raises(CheckpointError, match=r"both hold model\.embed_tokens\.weight"):
        open_checkpoint(path)

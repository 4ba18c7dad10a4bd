"""Octavo's own format: round trips, other device counts than the writer's, damage."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from octavo.configs.model_config import RopeScaling
from octavo.models.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from octavo.models.convert import convert
from octavo.models.decoder import ParameterSpec, declared_parameters
from octavo.models.orbax_checkpoint import save_orbax
from tests.models.tiny_checkpoints import (
    decoder_parameters,
    random_tensors,
    tiny_config,
    write_gguf,
    write_huggingface,
)

ROOT = Path(__file__).parents[2]
CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG)


def one_device(_: ParameterSpec) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def load(checkpoint: Checkpoint, dtype: str) -> dict[str, jax.Array]:
    return checkpoint.load(declared_parameters(checkpoint.config, dtype), one_device)


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A tiny checkpoint in bfloat16."""
    source = write_huggingface(tmp_path / "source", CONFIG, TENSORS)
    convert(source, tmp_path / "native", "bfloat16")
    return tmp_path / "native"


def test_conversion_keeps_every_bit_and_all_that_belongs_to_the_model(tmp_path: Path) -> None:
    """HF -> ours -> ours: parameters, architecture, end-of-sequence ids, tokenizer files."""
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    config = tiny_config(tie_word_embeddings=False, rope_scaling=scaling)
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    tensors = random_tensors(config)
    source = write_huggingface(
        tmp_path / "tiny",
        config,
        tensors,
        changes={"rope_scaling": rope, "eos_token_id": [258, 300]},
    )
    convert(source, tmp_path / "first", "bfloat16")
    convert(tmp_path / "first", tmp_path / "second", "bfloat16")
    for folder in (tmp_path / "first", tmp_path / "second"):
        checkpoint = open_checkpoint(folder)
        assert checkpoint.config == config
        assert checkpoint.eos_token_ids == {258, 300}
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            copied = checkpoint.tokenizer_source / name
            assert copied.read_bytes() == (source / name).read_bytes()
        parameters = load(checkpoint, "bfloat16")
        for path, value in decoder_parameters(config, tensors).items():
            dtype = np.float32 if path.endswith("norm") else ml_dtypes.bfloat16
            assert parameters[path].dtype == dtype
            bits = np.asarray(parameters[path]).tobytes()
            assert bits == value.astype(dtype).tobytes(), path


def test_a_gguf_vocabulary_is_carried(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", CONFIG, TENSORS)
    convert(source, tmp_path / "first", "float32")
    convert(tmp_path / "first", tmp_path / "second", "float32")
    vocabulary = open_checkpoint(tmp_path / "second").tokenizer_source
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(vocabulary)
    assert after.tensors == []
    for name, field in before.fields.items():
        if name.startswith("tokenizer."):
            assert after.fields[name].contents() == field.contents(), name


# Saves with every array split over eight devices, whatever the engine's own rule would be.
SAVE_ON_EIGHT = """
import sys
from pathlib import Path
from tests.models.test_orbax_checkpoint import split_over
from octavo.models.checkpoint import open_checkpoint
from octavo.models.decoder import declared_parameters
from octavo.models.orbax_checkpoint import save_orbax
source, destination = Path(sys.argv[1]), Path(sys.argv[2])
checkpoint = open_checkpoint(source)
declared = declared_parameters(checkpoint.config, "float32")
parameters = checkpoint.load(declared, split_over(8))
assert len({shard.device for shard in parameters["embedding"].addressable_shards}) == 8
assert parameters["embedding"].addressable_shards[0].data.shape == (40, 64)
save_orbax(destination, checkpoint, parameters)
"""
RESTORE_ON_TWO_AND_FOUR = """
import sys
from pathlib import Path
import jax
import numpy as np
from tests.models.test_orbax_checkpoint import assert_restores
assert len(jax.devices()) == 4
for num_devices in (2, 4):
    for dtype in ("float32", "bfloat16"):
        assert_restores(Path(sys.argv[1]), num_devices, dtype)
"""


def split_over(num_devices: int) -> Callable[[ParameterSpec], jax.sharding.Sharding]:
    """Splits the first dimension of each parameter that the devices divide."""
    mesh = jax.make_mesh(
        (num_devices,),
        ("model",),
        devices=jax.devices()[:num_devices],
        axis_types=(jax.sharding.AxisType.Auto,),
    )

    def sharding_of(spec: ParameterSpec) -> jax.sharding.Sharding:
        axes: list[str | None] = [None] * len(spec.shape)
        divided = [i for i, size in enumerate(spec.shape) if size % num_devices == 0]
        if divided:
            axes[divided[0]] = "model"
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    return sharding_of


def assert_restores(folder: Path, num_devices: int, dtype: str) -> None:
    """Loads on so many devices and compares placement, dtype and every value."""
    checkpoint = open_checkpoint(folder)
    declared = declared_parameters(checkpoint.config, dtype)
    sharding_of = split_over(num_devices)
    parameters = checkpoint.load(declared, sharding_of)
    expected = decoder_parameters(CONFIG, TENSORS)
    assert parameters.keys() == expected.keys()
    for path, array in parameters.items():
        assert array.sharding == sharding_of(declared[path]), path
        assert array.dtype == declared[path].dtype, path
        np.testing.assert_array_equal(np.asarray(array), expected[path].astype(array.dtype), path)


def run_on_virtual_devices(num_devices: int, script: str, *arguments: Path) -> str:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(
        command, check=True, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ).stdout.decode()


def test_what_eight_devices_wrote_loads_on_one_two_and_four(tmp_path: Path) -> None:
    """Failure case 8.5: breaks when the writer's sharding is rebuilt; its devices do not exist."""
    source = write_huggingface(tmp_path / "tiny", CONFIG, TENSORS)
    run_on_virtual_devices(8, SAVE_ON_EIGHT, source, tmp_path / "native")
    assert_restores(tmp_path / "native", 1, "float32")
    assert_restores(tmp_path / "native", 1, "bfloat16")
    run_on_virtual_devices(4, RESTORE_ON_TWO_AND_FOUR, tmp_path / "native")


def test_nothing_is_overwritten(native: Path, tmp_path: Path) -> None:
    before = (native / "octavo.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"native: exists already"):
        convert(tmp_path / "source", native, "bfloat16")
    checkpoint = open_checkpoint(native)
    with pytest.raises(CheckpointError, match=r"native: exists already"):
        save_orbax(native, checkpoint, load(checkpoint, "bfloat16"))
    assert (native / "octavo.json").read_bytes() == before
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(CheckpointError, match=r"other\.partial: exists already"):
        convert(native, tmp_path / "other", "bfloat16")
    assert not (tmp_path / "other").exists()


def test_a_disk_that_is_full_is_said_first(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=1000)

    monkeypatch.setattr("octavo.models.orbax_checkpoint.shutil.disk_usage", usage)
    with pytest.raises(CheckpointError, match=r"other: needs \d+ bytes, and 1000 are free"):
        convert(native, tmp_path / "other", "bfloat16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "source"]


def test_a_name_that_cannot_be_written_is_an_error(native: Path, tmp_path: Path) -> None:
    """TensorStore takes UTF-8 only, and says so when it has begun to write."""
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(native, tmp_path / "a\udcff", "bfloat16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "source"]


def test_a_failed_conversion_leaves_nothing(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("octavo.models.orbax_checkpoint.shutil.copyfile", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(native, tmp_path / "other", "bfloat16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "source"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_norm": None}, r"parameter final_norm is missing"),
        ({"extra": np.ones(3, np.float32)}, r"no place for parameter extra"),
        ({"layers.1.down": np.ones((64, 95), np.float32)}, r"layers\.1\.down has shape \[64, 95\]"),
    ],
)
def test_parameters_must_be_exactly_the_model_s(
    change: dict[str, np.ndarray | None], message: str, native: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(native)
    parameters = load(checkpoint, "float32") | {
        path: value if value is None else jax.numpy.asarray(value) for path, value in change.items()
    }
    kept = {path: value for path, value in parameters.items() if value is not None}
    save_orbax(tmp_path / "other", checkpoint, kept)
    with pytest.raises(CheckpointError, match=message):
        load(open_checkpoint(tmp_path / "other"), "float32")


LOAD_EACH = """
import sys
from pathlib import Path
from tests.models.test_orbax_checkpoint import load
from octavo.models.checkpoint import CheckpointError, open_checkpoint
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        load(open_checkpoint(folder), "bfloat16")
        print(folder.name, "loaded")
    except CheckpointError as error:
        assert str(folder / "parameters") in str(error), error
        print(folder.name, "refused")
"""


def test_truncation_is_named(native: Path, tmp_path: Path) -> None:
    """In another process: TensorStore's other reads go on, and complain, after one has failed."""
    patterns = {"manifest": "manifest.ocdbt", "data": "d/*", "metadata": "_METADATA"}
    for name, pattern in patterns.items():
        for kept in (0.0, 0.5):
            folder = tmp_path / "damaged" / f"{name}-{kept}"
            shutil.copytree(native, folder)
            damaged = [*(folder / "parameters").rglob(pattern)]
            assert damaged
            for path in damaged:
                content = path.read_bytes()
                path.write_bytes(content[: int(kept * len(content))])
    shutil.copytree(native, tmp_path / "damaged" / "whole")
    output = run_on_virtual_devices(1, LOAD_EACH, tmp_path / "damaged").split("\n")
    refused = [f"{name}-{kept} refused" for name in sorted(patterns) for kept in (0.0, 0.5)]
    assert output == [*refused, "whole loaded", ""]


def test_lost_parameters_are_named(native: Path) -> None:
    (native / "parameters").rename(native / "lost")
    with pytest.raises(CheckpointError, match=r"parameters"):
        load(open_checkpoint(native), "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 1}, r"format_version is 1; it must be 2; convert the model again"),
        ({"format_version": None}, r"format_version is missing"),
        ({"config": {"name": "x"}}, r"config is no model config"),
        ({"config": None}, r"config is no model config"),
        ({"eos_token_ids": "x"}, r"eos_token_ids is 'x'"),
        ({"eos_token_ids": [2, 320]}, r"token id 320 is out of range"),
    ],
)
def test_a_broken_description_is_named(
    change: dict[str, object], message: str, native: Path
) -> None:
    description = json.loads((native / "octavo.json").read_text())
    (native / "octavo.json").write_text(json.dumps(description | change))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(native)


def test_no_file_is_a_pickle(native: Path) -> None:
    """Pickles of protocol 2 and later begin with byte 0x80 and end with a full stop."""
    for path in native.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not (content[:1] == b"\x80" and content[-1:] == b"."), path


@pytest.mark.full
def test_the_default_model_survives_conversion(default_model_path: Path, tmp_path: Path) -> None:
    """GGUF -> ours in float32: every bit of the dequantised weights."""
    convert(default_model_path, tmp_path / "native", "float32")
    before = load(open_checkpoint(default_model_path), "float32")
    after = load(open_checkpoint(tmp_path / "native"), "float32")
    assert before.keys() == after.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(np.asarray(after[path]), np.asarray(value), path)

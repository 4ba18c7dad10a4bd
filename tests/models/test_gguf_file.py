"""Files that the gguf package writes, and what damage does to them."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.models.gguf_file import read_gguf
from octavo.models.metadata import CheckpointError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65_535)
    writer.add_int16("i16", -32_768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 日本")
    writer.add_array("words", ["a", "", "日本"])
    writer.add_array("numbers", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_every_type(path: Path):
    values = dict(read_gguf(path).metadata.values)
    assert values == {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -128,
        "u16": 65_535,
        "i16": -32_768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "naïve 日本",
        "words": ["a", "", "日本"],
        "numbers": [1, -2, 3],
    }
    assert values["yes"] is True


def test_every_cut_is_noticed(path: Path):
    """A file cut off anywhere in its metadata is refused by name, never half read."""
    data = path.read_bytes()
    for length in range(0, len(data.rstrip(b"\0")), 7):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"model\.gguf: "):
            read_gguf(path)


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "GGUF version is 1"),
        (4, struct.pack(">I", 3), "GGUF version is 50331648.*little-endian"),
        (16, struct.pack("<Q", 2**60), "damaged"),  # number of keys
        (24, struct.pack("<Q", 2**63), "damaged"),  # length of the first key
        (32, b"\xff", "damaged"),  # a key that is not UTF-8
        (24 + 8 + len("general.architecture"), struct.pack("<I", 99), "damaged"),  # a type
    ],
)
def test_damage_is_noticed(path: Path, offset: int, replacement: bytes, message: str):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(replacement)] = replacement
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


def test_long_arrays_do_not_reserve_memory(path: Path):
    """An array that says it has 2^60 numbers is refused before anything is allocated for it."""
    data = bytearray(path.read_bytes())
    key = data.index(b"numbers")
    start = key + len("numbers") + 4 + 4
    data[start : start + 8] = struct.pack("<Q", 2**60)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        read_gguf(path)


@pytest.fixture
def with_tensors(tmp_path: Path) -> Path:
    """An alignment of its own, a vector and a matrix that are no float32, three dimensions."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    values = np.arange(3 * 4 * 32, dtype=np.float32)
    kind = gguf.GGMLQuantizationType
    writer.add_tensor("cube", values.reshape(3, 4, 32))
    writer.add_tensor("vector", gguf.quantize(values, kind.BF16), raw_dtype=kind.BF16)
    matrix = gguf.quantize(values.reshape(12, 32), kind.Q8_0)
    writer.add_tensor("matrix", matrix, raw_dtype=kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tensors_are_what_the_package_reads(with_tensors: Path):
    file = read_gguf(with_tensors)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(with_tensors).tensors}
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {
        "cube": (3, 4, 32),
        "vector": (384,),
        "matrix": (12, 32),
    }
    for name, tensor in tensors.items():
        whole = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.read_rows(name, slice(None)), whole)
        np.testing.assert_array_equal(file.read_rows(name, slice(1, 3)), whole[1:3])


@pytest.mark.parametrize(
    ("found", "replacement", "message"),
    [
        (b"matrix", b"vector", "tensor vector is there twice"),
        (b"general.alignment\x04\0\0\0\x80", b"general.alignment\x04\0\0\0\0", "at least 1"),
        # The cube's dimensions (32, 4, 3), then its type.
        (struct.pack("<QQQI", 32, 4, 3, 0), struct.pack("<QQQI", 32, 4, 3, 99), "99 is not"),
        (struct.pack("<QQQI", 32, 4, 3, 0), struct.pack("<QQQI", 2**40, 4, 3, 0), "past the end"),
        (struct.pack("<IQQ", 2, 32, 12), struct.pack("<IQQ", 2, 31, 12), "not a multiple"),
    ],
)
def test_damaged_descriptions_are_noticed(
    with_tensors: Path, found: bytes, replacement: bytes, message: str
):
    data = with_tensors.read_bytes()
    assert found in data
    with_tensors.write_bytes(data.replace(found, replacement))
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{message}"):
        read_gguf(with_tensors)

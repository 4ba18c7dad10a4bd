"""read_gguf_metadata against files that the gguf package writes."""

import struct
from pathlib import Path

import gguf
import pytest

from octavo.models.gguf_metadata import read_gguf_metadata
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
    values = dict(read_gguf_metadata(path).values)
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
            read_gguf_metadata(path)


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
        read_gguf_metadata(path)


def test_long_arrays_do_not_reserve_memory(path: Path):
    """An array that says it has 2^60 numbers is refused before anything is allocated for it."""
    data = bytearray(path.read_bytes())
    key = data.index(b"numbers")
    start = key + len("numbers") + 4 + 4
    data[start : start + 8] = struct.pack("<Q", 2**60)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        read_gguf_metadata(path)

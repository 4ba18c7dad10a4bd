"""A GGUF file, opened: its metadata, and its tensors mapped into memory. No JAX.

The header is read in one pass into plain Python values; the `gguf` package's own reader keeps an
array object for each of the hundreds of thousands of strings in a vocabulary and takes seconds
over it. Which types of tensor there are, and what their bytes mean, is left to the package.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from gguf.quants import quant_shape_to_byte_shape

from .metadata import CheckpointError, Metadata

MAGIC = b"GGUF"
_VERSIONS = (2, 3)

# struct's letter for each of GGUF's scalar types.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9

# The count of tensors, which follows the magic and the version.
_NUM_TENSORS = slice(8, 16)
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
      shape: In row-major order; the file lists the fastest dimension first.
      type: How its values are encoded.
      data: Its rows as they are stored: uint8, mapped and not read.
    """

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """An open file. The map ends with the last reference to it.

    Attributes:
      metadata: All keys and values.
      tensors: By name.
      content: The whole file.
      metadata_end: Where in it the metadata end and the tensors' descriptions begin.
    """

    metadata: Metadata
    tensors: Mapping[str, GgufTensor]
    content: mmap.mmap
    metadata_end: int

    def read_rows(self, name: str, rows: slice) -> np.ndarray:
        """A range of a tensor's first dimension, decoded to float32.

        Raises:
          CheckpointError: The tensor is of a type that the gguf package cannot decode.
        """
        tensor = self.tensors[name]
        try:
            if len(tensor.shape) == 1:  # stored as one row
                return dequantize(tensor.data, tensor.type)[rows]
            return dequantize(tensor.data[rows], tensor.type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.metadata.source}: tensor {name} has type {tensor.type.name}, "
                "which cannot be decoded"
            ) from error

    def without_tensors(self) -> bytes:
        """A GGUF file that holds the same metadata, the vocabulary included, and nothing else."""
        head, rest = self.content[: _NUM_TENSORS.start], slice(_NUM_TENSORS.stop, self.metadata_end)
        return head + bytes(8) + self.content[rest]


def read_gguf(path: Path) -> GgufFile:
    """Maps a GGUF file and reads its header.

    Raises:
      CheckpointError: Not a GGUF file of a known version, or one that is cut off or damaged.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise CheckpointError(
                    f"{path}: not a GGUF file: it begins with {magic!r}, not {MAGIC!r}"
                )
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: not readable: {error.strerror}") from error
    reader = _Reader(content, len(MAGIC))
    try:
        return _read(reader, content, path)
    except CheckpointError:
        raise
    except (struct.error, ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: damaged or cut off; read up to byte {reader.position}: {error!r}"
        ) from error


def _read(reader: "_Reader", content: mmap.mmap, path: Path) -> GgufFile:
    version = reader.scalar("I")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path}: GGUF version is {version}; it must be one of {_VERSIONS}, little-endian"
        )
    num_tensors, num_values = reader.scalar("Q"), reader.scalar("Q")
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.string()
        if key in values:
            raise ValueError(f"{key} is there twice")
        values[key] = reader.value(reader.scalar("I"))
    metadata, metadata_end = Metadata(values, path), reader.position

    descriptions: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
    for _ in range(num_tensors):
        name = reader.string()
        if name in descriptions:
            raise ValueError(f"tensor {name} is there twice")
        dimensions = [reader.scalar("Q") for _ in range(reader.scalar("I"))]
        if not dimensions:
            raise ValueError(f"tensor {name} has no dimensions")
        tensor_type, offset = GGMLQuantizationType(reader.scalar("I")), reader.scalar("Q")
        descriptions[name] = tuple(reversed(dimensions)), tensor_type, offset

    alignment = metadata.integer("general.alignment", _DEFAULT_ALIGNMENT)
    if alignment < 1:
        raise metadata.error("general.alignment", "at least 1")
    data_start = -(-reader.position // alignment) * alignment
    tensors = {}
    for name, (shape, tensor_type, offset) in descriptions.items():
        byte_shape = quant_shape_to_byte_shape(shape, tensor_type)
        start, size = data_start + offset, math.prod(byte_shape)
        if start + size > len(content):
            raise ValueError(f"tensor {name} goes past the end of the file")
        data = np.frombuffer(content, np.uint8, size, start).reshape(byte_shape)
        tensors[name] = GgufTensor(shape, tensor_type, data)
    return GgufFile(metadata, tensors, content, metadata_end)


class _Reader:
    """Reads one value after another."""

    def __init__(self, content: mmap.mmap, start: int) -> None:
        self._content = content
        self.position = start

    def scalar(self, letter: str) -> Any:
        (value,) = self._unpack("<" + letter)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.position + length
        if end > len(self._content):
            raise struct.error(f"a string of {length} bytes goes past the end of the file")
        text = self._content[self.position : end].decode()
        self.position = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            return list(self._unpack(f"<{length}{_SCALARS[kind]}"))
        return [self.value(kind) for _ in range(length)]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._content, self.position)
        self.position += struct.calcsize(layout)
        return values

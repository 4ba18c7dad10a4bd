"""The metadata of a GGUF file, read in one pass. No JAX.

The `gguf` package keeps an array object for each of the hundreds of thousands of strings in a
vocabulary and takes seconds over it; this reads the same into plain Python values at once.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from .metadata import CheckpointError, Metadata

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
_VERSIONS = (2, 3)


def read_gguf_metadata(path: Path) -> Metadata:
    """All keys and values of a GGUF file, tensors left alone.

    Raises:
      CheckpointError: Not a GGUF file of a known version, or one that is cut off or damaged.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data, start=4)
            try:
                version = reader.scalar("I")
                if version not in _VERSIONS:
                    raise CheckpointError(
                        f"{path}: GGUF version is {version}; it must be one of {_VERSIONS}, "
                        "little-endian"
                    )
                reader.scalar("Q")  # number of tensors
                values = {}
                for _ in range(reader.scalar("Q")):
                    key = reader.string()
                    values[key] = reader.value(reader.scalar("I"))
            except (struct.error, UnicodeDecodeError, KeyError) as error:
                raise CheckpointError(
                    f"{path}: the metadata is damaged at byte {reader.position}: {error!r}"
                ) from error
    return Metadata(values, path)


class _Reader:
    def __init__(self, data: mmap.mmap, start: int) -> None:
        self._data = data
        self.position = start

    def scalar(self, letter: str) -> Any:
        (value,) = self._unpack("<" + letter)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.position + length
        if end > len(self._data):
            raise struct.error(f"a string of {length} bytes goes past the end of the file")
        text = self._data[self.position : end].decode()
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
        values = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return values

"""Typed reading of what a checkpoint says about itself. No JAX.

Whatever the file format, its metadata is a mapping from keys to values that somebody else wrote.
Every complaint names the file, the key and the value found there.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Metadata:
    """Keys and values from one place in a checkpoint.

    Absent and null mean the same everywhere: Hugging Face writes both for "not set".

    Attributes:
      values: The mapping.
      source: Where it was read; begins every error message.
    """

    values: Mapping[str, Any]
    source: Path

    def get(self, key: str) -> object:
        """The value as it is, None if absent."""
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; raises CheckpointError if it is another type, or absent without default."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """An integer or float, as a float; raises CheckpointError as `integer` does."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number")
        try:
            return float(value)
        except OverflowError as error:
            raise self.error(key, "a number that a float can hold") from error

    def boolean(self, key: str, default: bool) -> bool:
        """A boolean; raises CheckpointError if it is another type."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def token_ids(self, key: str) -> frozenset[int]:
        """One token id, a list of them, or none; raises CheckpointError if it is another type."""
        value = self.values.get(key)
        if value is None:
            return frozenset()
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise self.error(key, "a token id or a list of them")
        return frozenset(ids)

    def require(self, key: str, allowed: object) -> None:
        """Raises CheckpointError unless the key is absent or has the one value that is supported.

        For settings that change what the model computes and that the decoder does not have.
        """
        value = self.values.get(key)
        if value is not None and value != allowed:
            supported = "leaving it out" if allowed is None else f"{allowed!r}"
            raise CheckpointError(
                f"{self.source}: {key} is {value!r}, which is not supported; only {supported} is"
            )

    def error(self, key: str, expected: str) -> CheckpointError:
        """Says that the value of `key` is not what was expected, or that it is missing."""
        value = self.values.get(key)
        if value is None:
            return CheckpointError(f"{self.source}: {key} is missing; it must be {expected}")
        return CheckpointError(f"{self.source}: {key} is {value!r}; it must be {expected}")

    def _present(self, key: str, default: object) -> object:
        value = self.values.get(key)
        return default if value is None else value


def read_json(path: Path, *, is_optional: bool = False) -> Metadata:
    """The object in a JSON file.

    Args:
      path: The file.
      is_optional: A file that does not exist says nothing, instead of being an error.

    Raises:
      CheckpointError: There is no such file, or it holds no JSON object.
    """
    if is_optional and not path.exists():
        return Metadata({}, path)
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}; it must hold an object")
    return Metadata(value, path)


def check_token_ids(token_ids: Iterable[int], vocab_size: int, source: Path) -> None:
    """Raises CheckpointError if a special id is outside the vocabulary."""
    for token_id in sorted(token_ids):
        if not 0 <= token_id < vocab_size:
            raise CheckpointError(
                f"{source}: special token id {token_id} is out of range; "
                f"the vocabulary is [0, {vocab_size})"
            )

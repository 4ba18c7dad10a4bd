"""Values inside a JSON schema; those that no output can have as they are, are refused. No JAX."""

import re
from collections.abc import Iterable, Mapping

from .json_schema_numbers import check_exact

MAX_DEPTH = 120
"""Objects and arrays in one another; llguidance reads a few more."""

# Outputs have no \u escapes in strings.
_UNSPELLABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def check_depth(schema: object) -> None:
    """Raises ValueError if it is nested too deeply for functions that call themselves."""
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        inner = (each for outer in level for each in _inner(outer))
        level = [each for each in inner if not isinstance(each, str | int | float | None)]
        if not level:
            return
    raise ValueError(f"the schema has more than {MAX_DEPTH} objects and arrays in one another")


def check_value(value: object, place: str) -> None:
    """Raises ValueError if no output can have this value of const or enum, or it may be misread."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            check_name(str(name), place)
            check_value(each, place)
    elif isinstance(value, list):
        for each in value:
            check_value(each, place)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        check_exact(value, place)
    elif isinstance(value, str) and _UNSPELLABLE.search(value):
        raise ValueError(f"{place} has a control character without a short escape in JSON")


def check_name(name: str, place: str) -> None:
    """Raises ValueError for a property's name that rewritten patterns would not match.

    Other control characters are right in names: llguidance spells those itself.
    """
    if "\0" in name:
        raise ValueError(f"{place} has a name with the character U+0000, which is not supported")


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()

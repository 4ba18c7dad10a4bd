"""Values inside a JSON schema; those that no output can have as they are, are refused. No JAX."""

import re
from collections.abc import Iterable, Mapping

from .json_schema_numbers import check_exact
from .json_schema_patterns import UNSPELLABLE

MAX_DEPTH = 120
"""Objects and arrays in one another; llguidance reads a few more."""

_UNSPELLABLE = re.compile(UNSPELLABLE)


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
    """Raises ValueError for a property's name that rewritten patterns would not match."""
    if _UNSPELLABLE.search(name):
        raise ValueError(
            f"{place} has a name with a control character without a short escape in JSON"
        )


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()

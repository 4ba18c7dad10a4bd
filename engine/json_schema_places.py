"""Where subschemas of a JSON schema stand, and which of them references may point to. No JAX."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

SUBSCHEMA = frozenset({"additionalProperties", "items"})
SUBSCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SUBSCHEMA_MAPS = frozenset({"patternProperties", "properties"})
DEFINITIONS = frozenset({"$defs", "definitions"})
ROOT_ANNOTATIONS = frozenset({"$id", "$schema"})
"""At the root they annotate; elsewhere they change what references mean."""

# Patterns are rewritten, so another could get the name that a reference has.
_REFERRED_MAPS = DEFINITIONS | SUBSCHEMA_MAPS - {"patternProperties"}


def subschemas(schema: Mapping[str, Any], place: str) -> Iterator[tuple[object, str]]:
    """What a schema applies, with its place. Wrong types are left for llguidance to refuse."""
    for keyword, value in schema.items():
        at = f"{place}/{keyword}"
        if keyword in SUBSCHEMA:
            yield value, at
        elif keyword in SUBSCHEMA_LISTS and isinstance(value, list):
            yield from ((each, f"{at}/{number}") for number, each in enumerate(value))
        elif keyword in SUBSCHEMA_MAPS and isinstance(value, dict):
            yield from ((each, f"{at}/{name}") for name, each in value.items())


def resolve(root: Mapping[str, Any], reference: str) -> object:
    """The subschema inside the document that a reference points to, by RFC 6901.

    Raises:
      ValueError: What it points to is nothing, or is no subschema but a value, such as one of enum.
    """
    found: object = root
    parts = (
        unquote(part).replace("~1", "/").replace("~0", "~") for part in reference.split("/")[1:]
    )
    for keyword in parts:
        if not isinstance(found, Mapping) or keyword not in found:
            raise ValueError(f"$ref {reference!r:.100} points to nothing")
        if found is not root and not ROOT_ANNOTATIONS.isdisjoint(found):
            raise ValueError(f"$ref {reference!r:.100} crosses an $id or $schema: not supported")
        found = found[keyword]
        if keyword in SUBSCHEMA:
            continue
        name = next(parts, None)
        if name is None or keyword not in SUBSCHEMA_LISTS | _REFERRED_MAPS:
            raise ValueError(
                f"$ref {reference!r:.100} points to no subschema: supported are those in "
                f"{', '.join(sorted(SUBSCHEMA | SUBSCHEMA_LISTS | _REFERRED_MAPS))}"
            )
        if keyword in _REFERRED_MAPS and isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise ValueError(f"$ref {reference!r:.100} points to nothing")
    return found

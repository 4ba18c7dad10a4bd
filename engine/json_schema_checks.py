"""What of a JSON schema outputs can be held to; everything else is refused by name. No JAX.

llguidance refuses the keywords it knows and lacks, and ignores in silence those it doesn't know. It
also follows references as deep as they go, on the stack. So a schema is walked here first, the way
llguidance walks it: from the root, and into definitions where something refers to them. What
llguidance would read in another way is written in its own on the way.

A format is held to by its spelling, not by the calendar: 2023-02-29 is a date, and every minute may
have a 60th second.

Source of the meaning of keywords: JSON Schema, draft 2020-12.
"""

from collections.abc import Mapping
from typing import Any

from .json_schema_endings import Needs, endless, needs
from .json_schema_numbers import (
    BOUND_KEYWORDS,
    COUNT_KEYWORDS,
    check_bound,
    check_count,
    check_multiple,
    check_multiples,
    rewritten_bounds,
)
from .json_schema_patterns import rewritten_pattern
from .json_schema_places import (
    DEFINITIONS,
    ROOT_ANNOTATIONS,
    SUBSCHEMA,
    SUBSCHEMA_LISTS,
    SUBSCHEMA_MAPS,
    resolve,
    subschemas,
)
from .json_schema_values import check_depth, check_name, check_value

_ANNOTATIONS = DEFINITIONS | frozenset(
    {
        "$anchor",
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "default",
        "deprecated",
        "description",
        "discriminator",  # OpenAPI's: it names the branch of a oneOf and does not change it
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
_VALUES = frozenset({"const", "enum"})
_OTHERS = frozenset({"$ref", "format", "multipleOf", "pattern", "required", "type"})
_SUPPORTED = (
    _ANNOTATIONS
    | SUBSCHEMA
    | SUBSCHEMA_LISTS
    | SUBSCHEMA_MAPS
    | BOUND_KEYWORDS
    | COUNT_KEYWORDS
    | _VALUES
    | _OTHERS
)
_ALTERNATIVES = frozenset({"$ref", "anyOf", "oneOf"})
_FORMATS = (
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
)
_DRAFT = "https://json-schema.org/draft/2020-12/schema"

# By draft: what llguidance ignores in its schemas, or takes for something else.
_UNKNOWN: dict[str, frozenset[str]] = {
    _DRAFT: frozenset(),
    "https://json-schema.org/draft/2019-09/schema": frozenset({"prefixItems"}),
    "http://json-schema.org/draft-07/schema": frozenset({"prefixItems"}),
    "http://json-schema.org/draft-06/schema": frozenset({"prefixItems"}),
    "http://json-schema.org/draft-04/schema": frozenset({"const", "prefixItems"}),
}

MAX_SUBSCHEMAS = 10_000
"""Subschemas that are visited, those that are referred to twice counted twice where it matters."""

MAX_LEVELS = 400
"""Levels of nesting of the root and of everything that is referred to, added up.

llguidance descends so far on the stack at worst; at about 1,200 levels it overflowed 8 MiB, which
ends the process.
"""


def checked_json_schema(schema: object) -> dict[str, Any]:
    """The schema as llguidance gets it: what comes through this one validates against the other.

    Args:
      schema: A whole one, as json.loads made it.

    Raises:
      ValueError: It has something that cannot be held to; names it and its place.
    """
    if not isinstance(schema, dict):
        raise ValueError("the schema must be a JSON object")
    check_depth(schema)
    walk = _Walk(schema)
    walk.visit_all()
    rewritten = _rewritten(schema, walk.rewritten)
    assert isinstance(rewritten, dict)
    return rewritten


class _Walk:
    """One walk over everything of a schema that an output depends on.

    Attributes:
      rewritten: For each subschema, by its id, what llguidance gets in its place, but for those in
        it.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.rewritten: dict[int, dict[str, Any]] = {}
        self._root = root
        self._draft = _draft(root)
        self._multiples: set[int | float] = set()
        self._combines = False
        self._num_subschemas = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # of those visited: subschemas and levels
        self._places: dict[int, str] = {}
        self._needs: dict[int, Needs] = {}
        self._targets: dict[str, object] = {"#": root}  # by reference
        self._to_visit = ["#"]

    def visit_all(self) -> None:
        """Visits the root, then what it refers to, and so on."""
        num_levels = 0
        while self._to_visit:
            place = self._to_visit.pop()
            num_levels += self._visit(self._targets[place], place)
            if num_levels > MAX_LEVELS:
                raise ValueError(
                    f"the schema and what it refers to have more than {MAX_LEVELS} levels in all"
                )
        if self._combines:  # which with which is llguidance's to find out
            check_multiples(self._multiples)
        if without_end := endless(self._needs):
            place = next(place for each, place in self._places.items() if each in without_end)
            raise ValueError(f"what {place} requires never ends: no document can satisfy it")

    def _visit(self, schema: object, place: str) -> int:
        """Checks a subschema and those inside it; the levels that it has."""
        # A place may be referred to in many spellings: each counts, but what is there is read once.
        num_subschemas, num_levels = self._sizes.get(id(schema), (1, 0))
        self._num_subschemas += num_subschemas
        if self._num_subschemas > MAX_SUBSCHEMAS:
            raise ValueError(f"the schema has more than {MAX_SUBSCHEMAS} subschemas")
        if num_levels:
            return num_levels
        if isinstance(schema, bool):
            return 1
        if not isinstance(schema, dict):
            raise ValueError(f"{place} must be a schema: a JSON object, true or false")
        num_before = self._num_subschemas - 1
        self._check_keywords(schema, place)
        self.rewritten[id(schema)] = _rewritten_keywords(schema, place)
        if "multipleOf" in schema:
            self._multiples.add(schema["multipleOf"])
        self._combines |= _combines(schema)
        target = self._target(schema["$ref"], place) if "$ref" in schema else True
        self._places[id(schema)] = place[:200]  # a long name would be kept once for each inside
        self._needs[id(schema)] = needs(schema, target)
        inner = (self._visit(subschema, at) for subschema, at in subschemas(schema, place))
        num_levels = 1 + max(inner, default=0)
        self._sizes[id(schema)] = self._num_subschemas - num_before, num_levels
        return num_levels

    def _target(self, reference: object, place: str) -> object:
        """What a reference points to, which will be visited."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise ValueError(
                f'{place}/$ref must be "#" or begin with "#/": other documents and anchors are '
                "not supported"
            )
        if reference not in self._targets:
            self._targets[reference] = resolve(self._root, reference)
            self._to_visit.append(reference)
        return self._targets[reference]

    def _check_keywords(self, schema: Mapping[str, Any], place: str) -> None:
        supported = _SUPPORTED | ROOT_ANNOTATIONS if schema is self._root else _SUPPORTED
        unsupported = sorted(set(schema) - supported)
        if unsupported:
            names = ", ".join(map(repr, unsupported[:5]))
            raise ValueError(f"{place} has keywords that are not supported: {names}")
        if "format" in schema and schema["format"] not in _FORMATS:
            formats = ", ".join(_FORMATS)
            raise ValueError(
                f"{place}/format is {schema['format']!r:.100}; supported are {formats}"
            )
        if isinstance(schema.get("items"), list):
            raise ValueError(f"{place}/items is a list, as in older drafts; use prefixItems")
        for keyword in sorted(_UNKNOWN[self._draft] & schema.keys()):
            raise ValueError(f"{place} has {keyword}, which $schema's draft does not know")
        for keyword in BOUND_KEYWORDS & schema.keys():
            check_bound(schema[keyword], f"{place}/{keyword}")
        for keyword in COUNT_KEYWORDS & schema.keys():
            check_count(schema[keyword], f"{place}/{keyword}")
        if "multipleOf" in schema:
            check_multiple(schema["multipleOf"], f"{place}/multipleOf")
        for keyword in _VALUES & schema.keys():
            check_value(schema[keyword], f"{place}/{keyword}")
        _check_names(schema, place)
        _check_min_properties(schema, place)


def _draft(root: Mapping[str, Any]) -> str:
    draft = root.get("$schema", _DRAFT)
    if not isinstance(draft, str) or draft.rstrip("#") not in _UNKNOWN:
        raise ValueError(f"$schema is {draft!r:.100}; supported is {_DRAFT}")
    return draft.rstrip("#")


def _check_min_properties(schema: Mapping[str, Any], place: str) -> None:
    # A property that the schema does not name may come twice, and counts once.
    required = schema.get("required")
    names: list[object] = required if isinstance(required, list) else []
    num_named = len({name for name in names if isinstance(name, str)})
    least = schema.get("minProperties", 0)
    if least > num_named + 1:
        raise ValueError(
            f"{place}/minProperties is {least}; more than one beyond those in required is not "
            "supported"
        )


def _check_names(schema: Mapping[str, Any], place: str) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    for name in properties if isinstance(properties, dict) else ():
        check_name(str(name), f"{place}/properties")
    for name in required if isinstance(required, list) else ():
        check_name(str(name), f"{place}/required")


def _combines(schema: Mapping[str, Any]) -> bool:
    """Whether llguidance makes one of this subschema and others."""
    if "allOf" in schema or {"properties", "patternProperties"} <= schema.keys():
        return True
    applied = schema.keys() - _ANNOTATIONS - ROOT_ANNOTATIONS
    return len(applied) > 1 and not applied.isdisjoint(_ALTERNATIVES)


def _rewritten_keywords(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The subschema in llguidance's way, with what is inside as it was."""
    result = {key: value for key, value in schema.items() if key not in BOUND_KEYWORDS}
    result |= {key: int(schema[key]) for key in COUNT_KEYWORDS & schema.keys()}
    try:
        result |= rewritten_bounds(schema)
        if isinstance(schema.get("pattern"), str):
            result["pattern"] = rewritten_pattern(schema["pattern"])
        if isinstance(schema.get("patternProperties"), dict):
            inner = schema["patternProperties"].items()
            result["patternProperties"] = {rewritten_pattern(key): each for key, each in inner}
    except ValueError as error:
        raise ValueError(f"{place} cannot be held to: {error}") from error
    return result


def _rewritten(value: object, rewritten: Mapping[int, dict[str, Any]]) -> object:
    """The JSON with those dicts replaced, at every depth."""
    value = rewritten.get(id(value), value)
    if isinstance(value, dict):
        return {key: _rewritten(each, rewritten) for key, each in value.items()}
    if isinstance(value, list):
        return [_rewritten(each, rewritten) for each in value]
    return value

"""Schemas of which a part has no finite document are refused: fails where an output could come to
a place that it cannot leave, or where a schema is refused that has an end."""

import json
import re
from typing import Any

import pytest

from octavo.engine.json_schema_checks import checked_json_schema
from octavo.engine.json_schema_endings import Needs, endless

LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}
TO_ROOT = {"$ref": "#"}
TO_A = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (TO_ROOT, "#"),
        (TO_A | {"$defs": LOOP}, "#"),
        ({"type": "integer", "allOf": [TO_ROOT]}, "#"),
        ({"anyOf": [TO_ROOT, TO_ROOT]}, "#"),
        ({"oneOf": [TO_ROOT, False]}, "#"),
        ({"anyOf": [TO_A, {"type": "null"}], "$defs": LOOP}, "#/anyOf/0"),
        ({"properties": {"x": {}, "y": TO_A}, "required": ["x"], "$defs": LOOP}, "#/properties/y"),
        ({"additionalProperties": TO_A, "$defs": LOOP}, "#/additionalProperties"),
        ({"patternProperties": {"^a": TO_A}, "$defs": LOOP}, "#/patternProperties/^a"),
        ({"items": TO_A, "$defs": LOOP}, "#/items"),
        ({"type": "object", "properties": {"x": TO_ROOT}, "required": ["x"]}, "#"),
        ({"type": ["object"], "additionalProperties": TO_ROOT, "required": ["x"]}, "#"),
        ({"type": "object", "additionalProperties": TO_ROOT, "minProperties": 1.0}, "#"),
        (
            {
                "type": "object",
                "patternProperties": {"^x$": TO_ROOT},
                "additionalProperties": False,
                "required": ["x"],
            },
            "#",
        ),
        ({"type": "array", "items": TO_ROOT, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [{}, TO_ROOT], "minItems": 2.0}, "#"),
        ({"type": "array", "prefixItems": [{}], "items": TO_ROOT, "minItems": 10**12}, "#"),
        (
            {
                "properties": {"x": TO_A},
                "$defs": {
                    "a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/b"}},
                    "b": {"type": "object", "properties": {"a": TO_A}, "required": ["a"]},
                },
            },
            "#/properties/x",
        ),
    ],
)
def test_what_never_ends_is_named(schema: dict[str, Any], place: str):
    with pytest.raises(ValueError, match=f"what {re.escape(place)} requires never ends"):
        checked_json_schema(json.loads(json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [TO_ROOT, {"type": "integer"}]},
        {"anyOf": [TO_ROOT, True]},
        {"type": "object", "properties": {"x": TO_ROOT}},
        {"properties": {"x": TO_ROOT}, "required": ["x"]},  # a document of another type ends
        {"type": ["object", "null"], "properties": {"x": TO_ROOT}, "required": ["x"]},
        {
            "type": "object",
            "properties": {"x": {"anyOf": [TO_ROOT, {"type": "null"}]}},
            "required": ["x"],
        },
        {"type": "object", "properties": {"y": TO_ROOT}, "required": ["x"]},
        {"type": "object", "additionalProperties": TO_ROOT, "minProperties": 0},
        {"type": "object", "properties": {"x": {}, "y": TO_ROOT}, "minProperties": 1},
        {"type": "array", "items": TO_ROOT},
        {"type": "array", "prefixItems": [{}, TO_ROOT], "minItems": 1},
        {"type": "array", "prefixItems": [{}], "items": TO_ROOT, "minItems": 1},
        {"properties": {"x": False}, "items": False},
        {"$defs": LOOP},  # nothing refers to it
    ],
)
def test_what_has_an_end_passes(schema: dict[str, Any]):
    checked_json_schema(json.loads(json.dumps(schema)))


def test_time_is_linear():
    """In the worst order: a chain that ends last, which everything waits for. Fails by its time."""
    num = 200_000
    chain: dict[int, Needs] = {each: [[each + 1]] for each in range(num)}
    assert endless(chain | {num: []}) == set()
    assert endless(chain | {num: [[0]]}) == set(range(num + 1))
    leaves: dict[int, Needs] = {each: [] for each in range(1, num)}
    assert endless({0: [[each] for each in leaves]} | leaves) == set()

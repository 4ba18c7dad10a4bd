"""Schemas that outputs cannot be held to are refused by name: fails where one would be followed by
half, or could end the process."""

import json
import re
from typing import Any

import pytest

from octavo.engine.json_schema_checks import MAX_LEVELS, MAX_SUBSCHEMAS, check_json_schema

CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5_000)}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ([], "must be a JSON object"),
        (True, "must be a JSON object"),
        ({"type": "object", "nullable": True}, "'nullable'"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "#/properties/a/items has"),
        ({"anyOf": [{}, {"if": {}, "then": {}}]}, "#/anyOf/1 has keywords"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "'not'"),
        ({"properties": {"a": {"$ref": "#/x"}}, "title": "t"}, "points to nothing"),
        ({"$ref": "https://example.com/schema"}, "other documents"),
        ({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, "anchors are not supported"),
        ({"properties": {"a": {"$id": "inner"}}}, "'$id'"),
        ({"$schema": "https://example.com/draft"}, "$schema is"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": []},
            "draft does not know",
        ),
        ({"items": [{}, {}]}, "use prefixItems"),
        ({"format": "unknown"}, "#/format is 'unknown'"),
        ({"format": ["date"]}, "#/format is"),
        ({"exclusiveMinimum": True}, "#/exclusiveMinimum must be a number"),
        ({"maximum": 2**53 + 1}, "beyond 2**53"),
        ({"enum": [[{"a": -(2**60)}]]}, "#/enum has an integer"),
        ({"const": {"a": ["\x7f"]}}, "#/const has a control character"),
        ({"minProperties": 3, "required": ["a"]}, "#/minProperties is 3"),
        ({"properties": {"a": 5}}, "#/properties/a must be a schema"),
        ({"$ref": "#/$defs/d0", "$defs": CHAIN | {"d5000": {}}}, f"more than {MAX_LEVELS} levels"),
        ({"anyOf": [{}] * MAX_SUBSCHEMAS}, f"more than {MAX_SUBSCHEMAS} subschemas"),
    ],
)
def test_what_cannot_be_held_to_is_named(schema: Any, reason: str):
    with pytest.raises(ValueError, match=re.escape(reason)) as refused:
        check_json_schema(json.loads(json.dumps(schema)))
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$schema": "https://json-schema.org/draft/2020-12/schema#", "$id": "root"},
        # What nothing refers to says nothing of outputs; what looks like keywords may be names.
        {"$defs": {"a": {"not": {}}}, "default": {"if": 1}},
        {"properties": {"not": {"type": "null"}, "if": True}, "required": ["not"]},
        {"enum": [{"not": 1}], "examples": [{"if": 1}]},
        {"$ref": "#/$defs/a~1b~0%20", "$defs": {"a/b~ ": {"items": {"$ref": "#"}}}},
        {"anyOf": [{"$ref": "#/anyOf/1"}, {"type": "null"}]},
        {"minProperties": 2, "required": ["a"]},
    ],
)
def test_what_can_be_held_to_passes(schema: Any):
    check_json_schema(schema)


def test_schemas_that_refer_to_themselves_end():
    check_json_schema(
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
        }
    )

"""References point to subschemas alone: fails where a value that one points into, and that outputs
must have, is rewritten as if it were a schema, or where a reference means another place."""

from typing import Any

import pytest

from octavo.engine.json_schema_checks import checked_json_schema

from .byte_guides import schema_lets_through

VALUE: dict[str, Any] = {"exclusiveMinimum": 1, "pattern": "a.c", "items": {"minLength": 1.0}}
HOLDERS: list[tuple[dict[str, Any], str]] = [
    ({"const": VALUE}, "const"),
    ({"const": VALUE}, "const/items"),
    ({"const": [VALUE]}, "const/0"),
    ({"enum": [VALUE]}, "enum/0"),
    ({"enum": [{"properties": {"a": VALUE}}]}, "enum/0/properties/a"),
    ({"default": VALUE}, "default"),
    ({"examples": [VALUE]}, "examples/0"),
    ({"properties": {"items": {}}}, "properties"),
    ({"$defs": {"items": {}}}, "$defs"),
    ({"anyOf": [{}]}, "anyOf"),
    ({"patternProperties": {"^a": {}}}, "patternProperties/^a"),
    ({"required": ["a"]}, "required"),
]


@pytest.mark.parametrize(("holder", "pointer"), HOLDERS, ids=[each for _, each in HOLDERS])
@pytest.mark.parametrize("place", ["properties/a", "$defs/a", "$defs/a/items", "%24defs/a"])
def test_references_to_what_is_no_subschema_are_named(
    holder: dict[str, Any], pointer: str, place: str
):
    keyword = place.replace("%24", "$").split("/")[0]
    inner = {"items": holder} if place.endswith("items") else holder
    schema: dict[str, Any] = {keyword: {"a": inner}}
    schema["anyOf"] = [{"$ref": f"#/{place}/{pointer}"}]
    with pytest.raises(ValueError, match="points to no subschema"):
        checked_json_schema(schema)


def test_values_that_look_like_schemas_stay():
    for keyword, value in (("const", VALUE), ("enum", [VALUE])):
        schema = {"anyOf": [{keyword: value}, {"$ref": "#/anyOf/0"}]}
        assert checked_json_schema(schema) == schema


@pytest.mark.parametrize(
    "pointer",
    [
        *("properties/a", "items", "additionalProperties", "prefixItems/0", "allOf/0", "anyOf/0"),
        *("oneOf/0", "$defs/a", "definitions/a", "definitions/b~1c", "%64efinitions/b~1c"),
        "items/properties/const",
    ],
)
def test_references_to_subschemas_are_followed(pointer: str):
    number = {"exclusiveMinimum": 1, "type": "number"}
    holder: dict[str, Any] = {key: {"a": number} for key in ("properties", "$defs")}
    holder |= {key: [number] for key in ("prefixItems", "allOf", "anyOf", "oneOf")}
    holder |= {"items": number | {"properties": {"const": number}}, "additionalProperties": number}
    holder["definitions"] = {"a": number, "b/c": number}
    lets_number_through = schema_lets_through(
        {"$ref": f"#/$defs/holder/{pointer}", "$defs": {"holder": holder}}
    )
    assert lets_number_through("2")
    assert not lets_number_through("1")


def test_references_do_not_cross_into_another_resource():
    """Inside it, a reference that begins with # means a place of that resource."""
    inner: dict[str, Any] = {
        "$id": "https://example.com/a",
        "$defs": {"b": {"$ref": "#/$defs/c"}, "c": {}},
    }
    with pytest.raises(ValueError, match=r"crosses an \$id"):
        checked_json_schema({"$ref": "#/$defs/a/$defs/b", "$defs": {"a": inner, "c": {}}})

"""Schemas that outputs cannot be held to are refused by name: fails where one would be followed by
half, or could end the process."""

import json
import re
from typing import Any

import pytest

from octavo.engine.json_schema_checks import MAX_LEVELS, MAX_SUBSCHEMAS, checked_json_schema
from octavo.engine.json_schema_values import MAX_DEPTH

from .byte_guides import schema_lets_through

CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5_000)}


def nested(name: str, depth: int = MAX_DEPTH + 1) -> dict[str, Any]:
    outer: dict[str, Any] = {}
    for _ in range(depth - 1):
        outer = {name: outer}
    return outer


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
        (
            {"$schema": "http://json-schema.org/draft-04/schema#", "items": {"const": 1}},
            "#/items has const, which $schema's draft does not know",
        ),
        ({"items": [{}, {}]}, "use prefixItems"),
        ({"format": "unknown"}, "#/format is 'unknown'"),
        ({"format": ["date"]}, "#/format is"),
        ({"exclusiveMinimum": True}, "#/exclusiveMinimum must be a number"),
        ({"maximum": 2**53 + 1}, "beyond 2**53"),
        ({"maximum": 1e30}, "beyond 2**53"),
        ({"exclusiveMinimum": 2**53}, "neighbour"),
        ({"enum": [[{"a": -(2**60)}]]}, "#/enum has a number beyond"),
        ({"const": 1e23}, "#/const has a number beyond"),
        ({"const": 0.30000000000000004}, "#/const has a number of more than 15 digits"),
        ({"enum": [{"a": 1e-23}]}, "#/enum has a number of more than 15 digits or 22 decimals"),
        ({"multipleOf": 0.1234567890123456}, "#/multipleOf has a number of more than 15 digits"),
        ({"allOf": [{"multipleOf": 2**16}, {"multipleOf": 2**16 + 1}]}, "common multiple"),
        ({"multipleOf": 1e-4, "anyOf": [{"multipleOf": 500_000}, {}]}, "common multiple"),
        ({"const": {"a": ["\x7f"]}}, "#/const has a control character"),
        ({"const": {"a\0": 1}}, "#/const has a name with a control character"),
        ({"properties": {"\0": True}}, "#/properties has a name with a control character"),
        ({"items": {"required": ["\0"]}}, "#/items/required has a name with a control character"),
        ({"items": {"pattern": "[]"}}, "#/items cannot be held to: it has a class"),
        ({"patternProperties": {"a\0": {}}}, "# cannot be held to: it has '\\x00', a control"),
        (nested("items"), f"more than {MAX_DEPTH} objects and arrays in one another"),
        ({"const": nested("a")}, f"more than {MAX_DEPTH} objects and arrays in one another"),
        ({"multipleOf": "1"}, "#/multipleOf must be a number"),
        ({"allOf": [{"multipleOf": 0}]}, "#/allOf/0/multipleOf must be above 0"),
        ({"multipleOf": -0.5}, "#/multipleOf must be above 0"),
        ({"minProperties": 3.0, "required": ["a"]}, "#/minProperties is 3"),
        ({"minProperties": 3, "required": ["a"]}, "#/minProperties is 3"),
        ({"minProperties": 3, "required": ["a", "a"]}, "#/minProperties is 3"),
        ({"minProperties": 3, "required": ["a", []]}, "#/minProperties is 3"),
        ({"properties": {"a": 5}}, "#/properties/a must be a schema"),
        ({"$ref": "#/$defs/d0", "$defs": CHAIN | {"d5000": {}}}, f"more than {MAX_LEVELS} levels"),
        ({"anyOf": [{}] * MAX_SUBSCHEMAS}, f"more than {MAX_SUBSCHEMAS} subschemas"),
    ],
)
def test_what_cannot_be_held_to_is_named(schema: Any, reason: str):
    with pytest.raises(ValueError, match=re.escape(reason)) as refused:
        checked_json_schema(json.loads(json.dumps(schema)))
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
        {"properties": {"a": {"multipleOf": 0.01, "type": "number"}}, "items": {"multipleOf": 1e6}},
        {"multipleOf": 0.01, "anyOf": [{"type": "integer"}, {"multipleOf": 5}]},
    ],
)
def test_what_can_be_held_to_passes(schema: Any):
    checked_json_schema(schema)


def test_schemas_that_refer_to_themselves_end():
    checked_json_schema(
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
        }
    )


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 1_000])
def test_depth_is_bounded_by_name(depth: int):
    """What is as deep as it may be, llguidance reads."""
    schema = nested("items", depth)
    if depth == MAX_DEPTH:
        schema_lets_through(schema | {"type": "array"})
        schema_lets_through({"const": nested("a", depth - 1)})
        return
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} objects and arrays"):
        schema_lets_through(schema)


@pytest.mark.parametrize(
    ("draft", "refused"),
    [
        ("draft-04", {"const", "prefixItems"}),
        ("draft-06", {"prefixItems"}),
        ("draft-07", {"prefixItems"}),
        ("draft/2019-09", {"prefixItems"}),
        ("draft/2020-12", set()),
    ],
)
def test_no_keyword_is_ignored_under_any_draft(draft: str, refused: set[str]):
    """Each rules one of the documents out, whatever $schema says; or it is refused."""
    scheme = "https" if "/" in draft else "http"
    narrowing: dict[str, Any] = {
        **{"type": "null", "const": 1, "enum": [1], "pattern": "b", "format": "date"},
        **{"minLength": 2, "maxLength": 0, "minimum": 2, "maximum": 0, "multipleOf": 2},
        **{"exclusiveMinimum": 1, "exclusiveMaximum": 1, "required": ["b"], "minProperties": 1},
        **{"properties": {"a": False}, "patternProperties": {"a": False}, "maxProperties": 0},
        **{"additionalProperties": False, "items": False, "minItems": 2, "maxItems": 0},
        **{"prefixItems": [False], "$ref": "#/$defs/a", "allOf": [{"type": "null"}]},
        **{"anyOf": [{"type": "null"}], "oneOf": [{"type": "null"}]},
    }
    for keyword, value in narrowing.items():
        schema = {"$schema": f"{scheme}://json-schema.org/{draft}/schema", keyword: value}
        schema |= {"$defs": {"a": {"type": "null"}}}
        if keyword in refused:
            with pytest.raises(ValueError, match="draft does not know"):
                schema_lets_through(schema)
        else:
            documents = ['{"a": 1}', "{}", "[1]", "1", '"a"']
            assert not all(map(schema_lets_through(schema), documents)), keyword


CONTROLS = [*map(chr, range(0x20)), "\x7f", "\x80", "\u2028"]
WITH_SPELLING = "\b\t\n\f\r\x80\u2028"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"NAME": {"const": 1}}, "required": ["NAME"]},
        {"properties": {"NAME": {"const": 1}}, "additionalProperties": {"const": 2}},
        {"required": ["NAME"], "additionalProperties": {"const": 1}},
        {"required": ["NAME"], "patternProperties": {'^[^"]*$': {"const": 1}}},
        {
            "properties": {"NAME": {"type": "integer"}},
            "patternProperties": {"^[^a-z]*$": {"const": 1}},
            "additionalProperties": {"const": 2},
        },
        {"const": {"NAME": 1}},
        {"allOf": [{"properties": {"NAME": {"const": 1}}}, {"additionalProperties": {"const": 1}}]},
    ],
)
def test_control_characters_in_names(schema: dict[str, Any]):
    """A name comes in one spelling, and what comes with it is what the schema has for it; those
    that lack a short escape are refused, for patterns go without them.
    """
    for character in CONTROLS:
        text = json.dumps({"type": "object"} | schema).replace("NAME", json.dumps(character)[1:-1])
        if character not in WITH_SPELLING:
            with pytest.raises(ValueError, match="a name with a control character"):
                checked_json_schema(json.loads(text))
            continue
        lets_object_through = schema_lets_through(json.loads(text))
        names = {json.dumps(character), json.dumps(character, ensure_ascii=False)}
        passing = [name for name in names if lets_object_through(f"{{{name}: 1}}")]
        assert len(passing) == 1, character
        assert json.loads(passing[0]) == character
        assert not any(lets_object_through(f"{{{name}: 2}}") for name in names)


@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_control_characters_in_texts(keyword: str):
    """Those with a short escape come, and all others are refused."""
    for character in CONTROLS:
        schema = {keyword: character if keyword == "const" else [character, "a"]}
        if character in WITH_SPELLING:
            assert schema_lets_through(schema)(json.dumps(character, ensure_ascii=False))
        else:
            with pytest.raises(ValueError, match="control character"):
                checked_json_schema(schema)


def test_the_schema_that_was_given_stays_as_it_is():
    """What is left of it, and the order of properties, which is that of the output, too."""
    schema = {"properties": {"b": {"exclusiveMinimum": 1}, "a": {"pattern": "[^a]"}}, "title": "t"}
    before = json.dumps(schema)
    checked = checked_json_schema(schema)
    assert json.dumps(schema) == before
    assert list(checked) == ["properties", "title"]
    assert list(checked["properties"]) == ["b", "a"]
    assert checked["properties"] != schema["properties"]


@pytest.mark.parametrize(
    "keyword",
    ["maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"],
)
def test_counts_are_whole_numbers(keyword: str):
    """A whole float is one too, and llguidance gets an integer."""
    for count in (0, 1, 1.0, -0.0):
        checked = checked_json_schema({"items": {keyword: count}})
        assert json.dumps(checked["items"]) == json.dumps({keyword: int(count)})
        schema_lets_through({"items": {keyword: count}})
    for wrong in (-1, -1.0, 1.5, True, "1", None, [1], 1e999):
        with pytest.raises(ValueError, match=f"#/items/{keyword} must be a whole number"):
            checked_json_schema({"items": {keyword: wrong}})


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("2023-02-29", True),
        ("2023-02-30", False),
        ("2023-13-01", False),
        ("12:00:60Z", True),
        ("12:00:61Z", False),
        ("24:00:00Z", False),
        ("2023-02-29T12:00:60Z", True),
        ("2023-02-30T12:00:00Z", False),
    ],
)
def test_formats_are_held_to_by_their_spelling(text: str, passes: bool):
    """What the check's docstring and the API promise: fails where they no longer say what is."""
    date_or_time = [{"type": "string", "format": each} for each in ("date", "time", "date-time")]
    assert schema_lets_through({"anyOf": date_or_time})(json.dumps(text)) is passes

"""The 200 schemas without a model: whatever ids come, if the masks let them, the JSON validates.

What would break this: a mask that lets through what the schema does not, a schema that is refused,
and a corpus that no longer has what it is there to cover.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from octavo.engine.guides import Guides
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.models.tokenizer import Tokenizer, load_tokenizer

from .json_schemas import CASES, LEVELS, Schema

MAX_TOKENS = 256
NUM_WALKS = 2

# What at least one schema of the level has. Other levels may have it too.
COVERED = {
    "flat": {"type", "properties", "required", "minLength", "maxLength", "optional", "nullable"},
    "enums": {"enum", "const", "mixed enum", "pattern"},
    "numbers": {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("fractional multipleOf", "open decimals"),
    },
    "strings": {
        *("pattern", "minLength", "maxLength", "format date", "format time"),
        *("format date-time", "format uuid", "format ipv4", "format email"),
    },
    "arrays": {"items", "minItems", "maxItems", "array in array", "object in array", "nullable"},
    "nested": {
        *("object in object", "array in object", "additionalProperties", "optional"),
        *("patternProperties", "minProperties", "maxProperties"),
    },
    "alternatives": {"anyOf", "oneOf", "allOf", "const", "nullable"},
    "references": {"$ref", "$defs", "recursion", "mutual recursion", "definitions"},
    "unicode": {"unicode key", "unicode enum", "unicode const", "unicode pattern"},
    "tuples": {"prefixItems", "items", "minItems", "maxItems", "array in array"},
    "apis": {
        *("array in object", "object in array", "object in object", "array in array"),
        *("enum", "const", "pattern", "format uuid", "format ipv4", "multipleOf", "prefixItems"),
        *("anyOf", "oneOf", "$ref", "optional", "patternProperties"),
    },
}


def subschemas(schema: Schema) -> Iterator[Schema]:
    """A schema and those inside it, definitions included; properties' names are no keywords."""
    yield schema
    for keyword, value in schema.items():
        inner: list[Any] = []
        if keyword in ("items", "additionalProperties"):
            inner = [value]
        elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            inner = value
        elif keyword in ("properties", "patternProperties", "$defs", "definitions"):
            inner = list(value.values())
        for each in inner:
            if isinstance(each, dict):  # or a boolean
                yield from subschemas(each)


def referred(schema: Schema) -> set[str]:
    return {each["$ref"] for each in subschemas(schema) if "$ref" in each}


def cycles(root: Schema) -> Iterator[int]:
    """For each definition that refers to itself: over how many references, the fewest."""
    definitions: dict[str, Schema] = root.get("$defs", {})
    leads_to = {f"#/$defs/{name}": referred(each) for name, each in definitions.items()}
    leads_to["#"] = referred({key: value for key, value in root.items() if key != "$defs"})
    for start in leads_to:
        reached, length = leads_to[start], 1
        while start not in reached and length <= len(leads_to):
            reached = reached.union(*(leads_to.get(each, set()) for each in reached))
            length += 1
        if start in reached:
            yield length


def is_foreign(value: object) -> bool:
    return not json.dumps(value, ensure_ascii=False).isascii()


def features(root: Schema) -> set[str]:
    """What a schema uses: its keywords, and what they make together."""
    found: set[str] = set()
    for schema in subschemas(root):
        found |= schema.keys()
        types = schema.get("type")
        if "format" in schema:
            found.add(f"format {schema['format']}")
        if (isinstance(types, list) and "null" in types) or {"type": "null"} in schema.get(
            "anyOf", []
        ):
            found.add("nullable")
        properties: dict[str, Any] = schema.get("properties", {})
        if set(properties) - set(schema.get("required", [])):
            found.add("optional")
        if any(map(is_foreign, properties)):
            found.add("unicode key")
        found |= {
            f"unicode {key}"
            for key in ("enum", "const", "pattern") & schema.keys()
            if is_foreign(schema[key])
        }
        if len({type(value) for value in schema.get("enum", [])}) > 1:
            found.add("mixed enum")
        if isinstance(schema.get("multipleOf"), float):
            found.add("fractional multipleOf")
        if types == "number" and not {"multipleOf", "enum"} & schema.keys():
            found.add("open decimals")
        members = [*properties.values(), *schema.get("prefixItems", []), schema.get("items")]
        inner = [each.get("type") for each in members if isinstance(each, dict)]
        found |= {f"{each} in {types}" for each in ("array", "object") if each in inner}
    lengths = list(cycles(root))
    return (
        found
        | ({"recursion"} if lengths else set())
        | ({"mutual recursion"} if any(length > 1 for length in lengths) else set())
    )


@pytest.fixture(scope="module")
def tokenizer(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(default_model_path)


def test_there_are_200_and_all_differ():
    assert len(CASES) == 200
    assert len({json.dumps(case.schema, sort_keys=True) for case in CASES}) == 200
    assert len({case.name for case in CASES}) == 200
    for case in CASES:
        assert case.prompt.splitlines() == [case.prompt]
        jsonschema.Draft202012Validator.check_schema(case.schema)


def test_every_level_covers_what_it_is_for():
    found = {
        name: set[str]().union(*(features(case.schema) for case in level))
        for name, level in LEVELS.items()
    }
    missing = {name: COVERED[name] - found[name] for name in LEVELS if COVERED[name] - found[name]}
    assert missing == {}


@pytest.mark.usefixtures("types_unchecked")
def test_random_outputs_end_and_validate(tokenizer: Tokenizer):
    """Outputs whose ids are drawn evenly from the masks."""
    eos = tokenizer.eos_token_ids
    guides = Guides(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=eos)
    num_ended = 0
    for case in CASES:
        guide = Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps(case.schema, ensure_ascii=False))
        for seed in range(NUM_WALKS):
            rng, state = random.Random(seed), guides.start(guide)
            token_ids: list[int] = []
            while len(token_ids) < MAX_TOKENS and not eos.intersection(token_ids[-1:]):
                bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
                token_ids.append(rng.choice(np.flatnonzero(bits).tolist()))
                state.take(token_ids[-1])
            if token_ids[-1] in eos:
                num_ended += 1
                output = tokenizer.decode(token_ids, skip_special_tokens=True)
                jsonschema.Draft202012Validator(case.schema).validate(json.loads(output))
    assert num_ended >= 0.99 * NUM_WALKS * len(CASES)

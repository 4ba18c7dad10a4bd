"""Patterns mean in outputs what JSON Schema says they mean: fails where a string comes through that
does not match, be it by what llguidance makes of a class in JSON's quotes or by its dialect."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.engine.json_schema_patterns import rewritten_pattern
from octavo.engine.sampling_params import Guide, GuideKind

from .byte_guides import lets_through, schema_lets_through

PATTERNS = [
    r'^[^"]*$',
    r"^[^\\]$",
    r'[^"]',
    r"^[^/]+$",
    r"^.*$",
    r"^.$",
    r"^\S+$",
    r"^\s*$",
    r"^[^\s/]+/[^\s/]+$",
    r'^[^\s"]$',
    r"^\W*$",
    r"^\D$",
    r"^[^\w/]+$",
    r"^[^a-z]$",
    r"^[\s\S]*$",
    r"^[\x00-\x1f]$",
    r"^[\x00-!]*$",
    r"^[\u0000-\u0021]*$",
    "^[\0-!]*$",
    r"^[!-~]*$",
    r'^[^"\\]*$',
    r'^[^"\n]+$',
    r'^[^\n\r"]*$',
    r"^[^\u0022]$",
    r'^[^\x00-\x1f"]*$',
    r'^([^"]|x)*$',
    r'^(?:\s|[^"])$',
    r'^(?:a|[^"\\])*$',
    r'^(?:[^"\t]|\t)*$',
    r'^[^"]{0,1}$',
    r'^([^"]|"")*$',
    r'^"?[^"]$',
    r'^[^"]|\\$',
    r'^[a\]"]$',
    r"^[^[\]]$",
    r"^[a[b]$",
    r"^[a[b]]?$",
    r"^[[:alpha:]]$",
    r"^[\w-]$",
    r"^[-\s]$",
    r'^[^a\-z"]{1,2}$',
    r'(?i)^[^A"]$',
    r"^\"\\?$",
    r"^a|/$",
    r"(^a|/)\\",
    r"^$|^a$",
    r"",
]
STRINGS = [
    "".join(characters)
    for length in range(3)
    for characters in itertools.product('"\\\n\ta/', repeat=length)
]


def matches(pattern: str, string: str) -> bool:
    """As ECMA-262 has it, where $ is no place before a last line feed."""
    return re.search(re.sub(r"\$(?=\||$)", r"\\Z", pattern), string) is not None


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Python's own sets in sets to come
@pytest.mark.parametrize("pattern", PATTERNS)
def test_strings_match(pattern: str):
    lets_string_through = schema_lets_through({"type": "string", "pattern": pattern})
    wrong = [
        string
        for string in STRINGS
        if lets_string_through(json.dumps(string)) != matches(pattern, string)
    ]
    assert wrong == []


@pytest.mark.parametrize("pattern", [r'^[^"]*$', r"^[^\\]+$", r'^([^"]|a)$', r"^.$"])
def test_names_match(pattern: str):
    """The others are additional properties."""
    lets_object_through = schema_lets_through(
        {
            "type": "object",
            "patternProperties": {pattern: {"const": 1}},
            "additionalProperties": {"const": 2},
        }
    )
    for string in STRINGS:
        name, is_match = json.dumps(string), matches(pattern, string)
        assert lets_object_through(f"{{{name}: 1}}") is is_match, string
        assert lets_object_through(f"{{{name}: 2}}") is not is_match, string


QUOTELESS: dict[str, Any] = {"type": "string", "pattern": '^[^"]*$'}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [QUOTELESS, {"maxLength": 9}]},
        {"anyOf": [QUOTELESS, {"type": "null"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": QUOTELESS}},
        {"properties": {"a": QUOTELESS}, "$ref": "#/properties/a"},
        {"type": "string", "$ref": "#/$defs/a", "$defs": {"a": {"pattern": '^[^"]*$'}}},
        QUOTELESS | {"maxLength": 9},
        {"allOf": [QUOTELESS, {"type": "string", "pattern": "^[^/]*$"}]},
    ],
)
def test_patterns_are_held_to_wherever_they_stand(schema: dict[str, Any]):
    lets_string_through = schema_lets_through(schema)
    assert lets_string_through('"a\\n"')
    assert not lets_string_through('"\\""')


def test_patterns_in_a_grammars_schema_are_held_to():
    text = f"start: %json {json.dumps(QUOTELESS)}"
    lets_string_through = lets_through(Guide(kind=GuideKind.GRAMMAR, text=text))
    assert lets_string_through('"a"')
    assert not lets_string_through('"\\""')


def test_what_only_looks_like_a_pattern_stays():
    pattern = '[^"]'
    schema = {"type": "object", "properties": {"pattern": {"const": pattern}}, "maxProperties": 1}
    schema |= {"required": ["pattern"]}
    assert schema_lets_through(schema)(json.dumps({"pattern": pattern}))


def classes() -> Iterator[str]:
    """Every class of up to three of these, in brackets or not, negated or not."""
    parts = ["a", '"', r"\\", r"\n", r"\s", r"\w", r"\D", "/", r"\x00", "-", " -!"]
    for num in (1, 2, 3):
        for chosen in itertools.combinations(parts, num):
            yield f"^[{''.join(chosen)}]$"
            yield f"^[^{''.join(chosen)}]$"


@pytest.mark.usefixtures("types_unchecked")
def test_no_class_lets_a_character_through_that_it_has_not():
    num_held = 0
    for pattern in classes():
        try:
            compiled = re.compile(pattern)
            lets_string_through = schema_lets_through({"type": "string", "pattern": pattern})
        except (re.error, ValueError):
            continue
        num_held += 1
        for character in '"\\\n\t\ra/-!_ 0':
            passes = lets_string_through(json.dumps(character))
            assert passes == bool(compiled.search(character)), (pattern, character)
    assert num_held > 400


UNSPELLABLE = [*range(0x08), 0x0B, *range(0x0E, 0x20), 0x7F]


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("code", UNSPELLABLE)
def test_a_control_character_that_no_output_can_have_is_not_left_out(code: int):
    """llguidance drops it: "ab" would match."""
    spellings = [chr(code), rf"\x{code:02x}", rf"\x{code:02X}", rf"\u{code:04x}", rf"\U{code:08X}"]
    spellings += [rf"\u{{{code:x}}}", rf"\x{{0{code:X}}}"]
    spellings += [{0x07: r"\a", 0x0B: r"\v"}.get(code, chr(code))]
    for spelling in spellings:
        for pattern in (f"^a{spelling}b$", f"^a{spelling}?b$", f"^(a|{spelling}b)"):
            with pytest.raises(ValueError, match="a control character that no output can have"):
                rewritten_pattern(pattern)
        with pytest.raises(ValueError, match="Regex is empty"):
            schema_lets_through({"type": "string", "pattern": f"^a[{spelling}]b$"})
    all_others = rf"\x00-\x{max(code - 1, 0):02x}\x{code + 1:02x}-\u{{10ffff}}"
    with pytest.raises(ValueError, match="Regex is empty"):
        schema_lets_through({"type": "string", "pattern": f"^a[^{all_others}]b$"})


def test_classes_may_have_control_characters_among_others():
    for pattern in (r"^a[\x01-\x1f]b$", r"^a[\v\n]b$", r"^a[\x7f\n]b$", r"^a\p{Cc}b$"):
        lets_string_through = schema_lets_through({"type": "string", "pattern": pattern})
        assert lets_string_through(r'"a\nb"')
        assert not lets_string_through('"ab"')
        assert not lets_string_through(r'"a\u0001b"')


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"a\x00", "a control character"),
        (r"\u0000|a", "a control character"),
        ("a\0", "a control character"),
        (r"^[]a]$", "begins with ]"),
        (r"^[^]a]$", "begins with ]"),
        (r"^[a", "does not end"),
        (r"^[a-z--b]$", "-- in a class"),
        (r"^[a&&b]$", "&& in a class"),
        (r"^[a~~b]$", "~~ in a class"),
        (r"(?x)a b", "'(?x)'"),
        (r"(?i-u:a)", "'(?i-u:'"),
        (r"(?s).", "'(?s)'"),
        (r"(?P<stop>a)b", "stop"),
        (r"(?<stop>a)b", "stop"),
        (r"\Aa\z", r"\A is an anchor"),
        (r"a*+a", "possessive"),
        (r"a{2}+a", "possessive"),
    ],
)
def test_what_dialects_read_differently_is_named(pattern: str, reason: str):
    with pytest.raises(ValueError, match=re.escape(reason)):
        rewritten_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["^[^\0]*$", r"^\[--&&\]\.\\(?:~~)$", r"^\p{Lu}\P{Lu}$", r"^(?<a>\/)(?P<b>é)$", r"\++"],
)
def test_what_they_read_alike_passes(pattern: str):
    rewritten_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "passing", "failing"),
    [
        (r"^\p{C}$", "\u00ad", '"\\'),
        (r"^\P{P}$", "a", '"\\/'),
        (r"^\P{Lu}$", 'a"\\', "A"),
        (r"^\pL$", "é", '"'),
        (r"^\s$", "\ufeff\u00a0\u2028", "\u0085"),
        (r"^\S$", "\u0085", "\ufeff\u00a0\u2028"),
        (r"^[\S]$", "\u0085", "\ufeff\u00a0\u2028"),
        (r"^[+-\d]$", "+-7", ",.A["),  # annex B: nothing ranges to a class
        (r"^.$", 'é"\\', "\n\r\u2028\u2029"),
        (r"^\d$", "7", "٣"),
    ],
)
def test_what_python_reads_otherwise_is_as_in_ecma_262(pattern: str, passing: str, failing: str):
    lets_string_through = schema_lets_through({"type": "string", "pattern": pattern})
    for character in passing:
        assert lets_string_through(json.dumps(character, ensure_ascii=False)), character
    for character in failing:
        assert not lets_string_through(json.dumps(character, ensure_ascii=False)), character

"""Guides of the largest size, made to be slow to check: fails where a check takes more than time in
proportion, which a client could use to hold up the process."""

import json
import signal
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from types import FrameType
from typing import Any

import pytest

from octavo.engine.json_schema_checks import checked_json_schema
from octavo.engine.json_schema_numbers import check_multiples
from octavo.engine.json_schema_patterns import rewritten_pattern
from octavo.engine.lark_grammar_checks import checked_grammar
from octavo.engine.sampling_checks import MAX_GUIDE_CHARACTERS
from octavo.engine.sampling_params import Guide, GuideKind

from .byte_guides import byte_guides

MAX_CPU_S = 4.0
"""Most take less than a tenth of a second, 43,000 empty schemas 1.5; what was slow took minutes."""

pytestmark = pytest.mark.usefixtures("types_unchecked")


@pytest.fixture(autouse=True)
def in_bounded_time() -> Iterator[None]:
    """In CPU time, as the machine may be shared; and ends a regular expression that does not."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it took too long")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, 2 * MAX_CPU_S)
    started_s = time.thread_time()
    try:
        yield
        assert time.thread_time() - started_s < MAX_CPU_S
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def largest(head: str, part: str, tail: str = "") -> str:
    """As many of the parts as a guide may have."""
    return head + part * ((MAX_GUIDE_CHARACTERS - len(head) - len(tail)) // len(part)) + tail


@pytest.mark.parametrize("quote", ['"', "/"])
@pytest.mark.parametrize("part", ["\\{}", "\\\\", "a", "\\{}a", "\\{}\\\n"])
def test_what_has_no_end_in_a_grammar_is_refused_at_once(quote: str, part: str):
    """Wherever it begins: its end would be looked for from each quote that follows."""
    for head in ("start: ", 'start: "a" /b/ # "\n| ', 'start: /["]/ | '):
        text = largest(head + quote, part.format(quote))
        with pytest.raises(ValueError, match=f"character {len(head)} with {quote} has no end"):
            checked_grammar(text, {})


@pytest.mark.parametrize(
    ("head", "part"),
    [
        ("start: ", '"'),
        ("start: ", "<a"),
        ("start: <", "a"),
        ("start: ", "<"),
        ("start: temperature", " "),
        ("", "temperature "),
        ("", "#"),
        ("", "/"),
        ("", "%"),
        ("", "%json"),
        ("", "%json{}"),
        ("start: %json", " "),
        ("start: %json ", '{"a":'),
        ('start: %json {"a":"', "\\\\"),
        ("", "%llguidance {}"),
        ("start: ", "a "),
        ("start: ", "a-"),
        ("start: ", '"" '),
        ("start: ", "("),
        ("start: ", "~"),
    ],
)
def test_other_tokens_of_a_grammar(head: str, part: str):
    with suppress(ValueError):
        checked_grammar(largest(head, part), {"item_separator": ", "})


@pytest.mark.parametrize(
    ("head", "part"),
    [
        ("", "["),
        ("", "[\\]"),
        ("[", "a"),
        ("[", "\\]"),
        ("", "[a]"),
        ("", "\\p{"),
        ("\\p{", "a"),
        ("", "\\s"),
        ("", "."),
        ("", "\\u{0"),
        ("\\u{", "0"),
        ("", "\\x0"),
        ("", "(?"),
        ("", "(?i"),
        ("(?", "i"),
        ("(?", "-"),
        ("", "{1"),
        ("{", "1"),
        ("{", ","),
        ("", "\\"),
    ],
)
def test_patterns(head: str, part: str):
    for text in (largest(head, part), largest(f"[{head}", part, "]")):
        with suppress(ValueError):
            rewritten_pattern(text)


def spellings(number: int) -> Iterator[dict[str, str]]:
    """References to one place, each in another way."""
    for each in range(number):
        name = "".join("%61" if each >> bit & 1 else "a" for bit in range(9))
        yield {"$ref": f"#/$defs/{name}"}


LONG_NAME = "n" * 100_000
DEFINITIONS: list[dict[str, Any]] = [
    {"enum": [1.5] * 30_000},
    {"pattern": "." * 150_000},
    {"required": ["a"] * 30_000},
    {"const": {f"a{number}": 1 for number in range(12_000)}},
    {"anyOf": [True] * 9_000},
    {"allOf": [{"pattern": "." * 1_000}] * 100},
]


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda each: next(iter(each)))
def test_a_place_is_read_once_however_it_is_spelled(definition: dict[str, Any]):
    schema = {"anyOf": list(spellings(390)), "$defs": {"a" * 9: definition}}
    assert len(json.dumps(schema)) < MAX_GUIDE_CHARACTERS
    with suppress(ValueError):
        checked_json_schema(json.loads(json.dumps(schema)))


def test_a_place_counts_in_every_spelling():
    """llguidance may take each for a place of its own: as many levels, as many subschemas."""
    inner: dict[str, Any] = {"$defs": {"a" * 9: {"items": {"items": {}}}}}
    checked_json_schema({"anyOf": list(spellings(100))} | inner)
    with pytest.raises(ValueError, match="levels in all"):
        checked_json_schema({"anyOf": list(spellings(200))} | inner)
    wide = {"$defs": {"a" * 9: {"anyOf": [True] * 1_000}}}
    checked_json_schema({"anyOf": list(spellings(9))} | wide)
    with pytest.raises(ValueError, match="subschemas"):
        checked_json_schema({"anyOf": list(spellings(11))} | wide)


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "a", "$ref": "#/title" + "/0" * 120_000},
        {"$ref": "#" + "/a" * 120_000},
        {"$ref": "#/" + "%" * 250_000},
        {"$ref": "#/" + "~1" * 125_000},
        {"anyOf": [{"$ref": "#/anyOf/" + "0" * 4_000 + str(number)} for number in range(60)]},
        {"allOf": [{"multipleOf": number} for number in range(1, 9_000)]},
        {"allOf": [{"minimum": number} for number in range(1, 9_000)]},
        {"properties": {LONG_NAME: {"required": ["a"] * 25_000}}},
        {"properties": {LONG_NAME: {"anyOf": [{"minimum": 1}] * 9_000}}},
        {"properties": {LONG_NAME: {"anyOf": [{}] * 9_000}}},
        {"$schema": "#" * 250_000},
        {
            "type": "object",
            "patternProperties": {f"a{number}": {} for number in range(9_000)},
            "required": [f"b{number}" for number in range(10_000)],
        },
        {f"k{number}": 1 for number in range(20_000)},
    ],
    ids=lambda each: json.dumps(each)[:30],
)
def test_schemas(schema: dict[str, Any]):
    assert len(json.dumps(schema)) < MAX_GUIDE_CHARACTERS
    with suppress(ValueError):
        checked_json_schema(schema)


def test_a_long_name_is_not_kept_for_every_subschema_inside():
    """Fails if whole places are: 100 KB each."""
    inside = ",".join(["{}"] * 9_000)  # apart, as a client's are
    schema = json.loads(f'{{"properties": {{"{LONG_NAME}": {{"anyOf": [{inside}]}}}}}}')
    tracemalloc.start()
    try:
        checked_json_schema(schema)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50 * 2**20


def test_a_common_multiple_that_is_too_large_does_not_grow():
    """Fails if it is reckoned to its end first: a number of hundreds of thousands of digits."""
    with pytest.raises(ValueError, match="common multiple"):
        check_multiples(Random(1).sample(range(1, 2**40), 30_000))


@pytest.mark.parametrize("part", ["(?:a*)*", "a?", ".*", "[a-z]{2}", "(a|b)+"])
@pytest.mark.parametrize("kind", [GuideKind.REGEX, GuideKind.GRAMMAR, GuideKind.JSON_SCHEMA])
def test_too_many_repetitions_are_refused_before_they_are_compiled(kind: GuideKind, part: str):
    """llguidance took 100 s for the first, with one of two threads that compile all guides."""
    expression = part * (200_000 // len(part))
    text = {
        GuideKind.REGEX: expression,
        GuideKind.GRAMMAR: f"start: /{expression}/",
        GuideKind.JSON_SCHEMA: json.dumps({"type": "string", "pattern": expression}),
    }[kind]
    with pytest.raises(ValueError, match="repetitions; it must have at most 2000"):
        byte_guides().check(Guide(kind=kind, text=text))

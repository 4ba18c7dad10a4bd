"""Grammars are cut into tokens as llguidance cuts them: fails where a schema inside a grammar would
pass unchecked, or a grammar that could end the process."""

import re

import pytest

from octavo.engine.lark_grammar_checks import MAX_DEFINITIONS, MAX_SET_OPERATORS, checked_grammar

OPTIONS = {"whitespace_flexible": False}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('start: "a" %json {"not": {}}', "'not'"),
        ('start: "%json" %json\n {"uniqueItems": true}', "'uniqueItems'"),
        ('start: "\\"" %json {"x-guidance": {"lenient": true}}', "'x-guidance'"),
        ('start: %json {"a": NaN}', "no JSON"),
        ("start: %json", "no JSON"),
        ("start: %json []", "must be a JSON object"),
        ("%json " + "[" * 100_000, "no JSON"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "allow_invalid_utf8"),
        ('start[temperature = 0.5]: "a"', "temperature"),
        (
            "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5_000)) + '\nr5000: "a"',
            f"at most {MAX_DEFINITIONS}",
        ),
        ("start: A\nA: " + " & ".join(["/a/"] * 8), f"at most {MAX_SET_OPERATORS} times"),
        ('start: A\nA: ~"a" & ~"b" & ~"c"', f"at most {MAX_SET_OPERATORS} times"),
    ],
)
def test_what_cannot_be_held_to_is_named(text: str, reason: str):
    with pytest.raises(ValueError, match=re.escape(reason)):
        checked_grammar(text, OPTIONS)


@pytest.mark.parametrize(
    "text",
    [
        'start: "%json" # %json {"not": {}}\n',
        'start: /[%]json {"not": \\/}/ // temperature = 1, and "more\n',
        'start: "' + "&~:(" * 500 + '"',
        "start: /" + "&~:(" * 500 + "/",
        'start: "a" <|json|> temperature\ntemperature: "b"',
        '%llguidance {"no_forcing": true}\nstart: A\nA: /a/ & ~/b/',
        "",
    ],
)
def test_what_only_looks_like_it_passes_as_it_is(text: str):
    assert checked_grammar(text, OPTIONS) == text


def test_schemas_inside_get_the_options_and_nothing_else_changes():
    before, after = 'start: "é" a "%json" ', ' | %json {"b": 1}'.replace('{"b": 1}', "{}") + "\n"
    checked = checked_grammar(before + '%json\n{"type": "null"}' + after + 'a: "x"', OPTIONS)
    options = '"x-guidance": {"whitespace_flexible": false}'
    assert checked == (f'{before}%json {{"type": "null", {options}}} | %json {{{options}}}\na: "x"')

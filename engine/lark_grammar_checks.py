"""What of a grammar outputs can be held to, and what a schema inside it means. No JAX.

The grammars are in llguidance's dialect of Lark:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. They are only cut into tokens
here; llguidance parses them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .json_schema_checks import checked_json_schema
from .regex_bounds import check_repetitions

MAX_DEFINITIONS = 500
"""Definitions and brackets of a grammar.

llguidance follows a chain of definitions on the stack; at about 2,000 it overflowed 8 MiB, which
ends the process.
"""

MAX_SET_OPERATORS = 2
"""Operators & and ~ of a grammar.

Each multiplies the work of a single step, which no limit of llguidance stops: five intersected
expressions took a second, six took more than twenty.
"""

_OPTIONS = frozenset({"allow_initial_skip", "ignore_once", "no_forcing"})

# As in llguidance's lexer (parser/src/lark/lexer.rs), where the longest match counts.
_TOKENS = re.compile(
    r"""
      (?P<comment> (?:\#|//)[^\n]*)
    | (?P<string> "(?:\\.|[^"\\\n])*")
    | (?P<expression> /(?:\\.|[^/\\])+/)
    | (?P<open> ["/])
    | (?P<special> <[^<>\s]+>)
    | (?P<json> %json|%regex|%llguidance)
    | (?P<temperature> temperature[ \t]*=)
    | (?P<name> [A-Za-z_][A-Za-z0-9_\-]*)
    | (?P<definition> [:(\[{])
    | (?P<operator> [&~])
    """,
    re.VERBOSE,
)
_JSON_SPACE = re.compile(r"[ \t\r\n]*")


def checked_grammar(text: str, json_options: Mapping[str, object]) -> str:
    """The grammar with its schemas checked, and options put into them.

    Args:
      text: A grammar.
      json_options: llguidance's JsonCompileOptions, for every schema in it.

    Raises:
      ValueError: It has something that cannot be held to; says what.
    """
    parts: list[str] = []
    start = num_definitions = num_operators = 0
    for kind, begin, end, value in _tokens(text):
        match kind:
            case "%json":
                schema = checked_json_schema(value) | {"x-guidance": json_options}
                parts += [text[start:begin], "%json ", json.dumps(schema, allow_nan=False)]
                start = end
            case "%llguidance":
                unknown = sorted(set(value) - _OPTIONS)
                if unknown:
                    raise ValueError(f"option {unknown[0]!r:.100} of %llguidance is not supported")
            case "temperature":
                raise ValueError(
                    "a rule sets a temperature, which is not supported: it is the request's"
                )
            case "open":  # to look for its end from every quote behind it takes minutes
                raise ValueError(f"what begins at character {begin} with {text[begin]} has no end")
            case "expression":
                check_repetitions(text[begin:end])
            case "definition":
                num_definitions += 1
            case "operator":
                num_operators += 1
            case _:
                pass
    if num_definitions > MAX_DEFINITIONS:
        raise ValueError(
            f"the grammar has {num_definitions} definitions and brackets; it must have at most "
            f"{MAX_DEFINITIONS}"
        )
    if num_operators > MAX_SET_OPERATORS:
        raise ValueError(
            f"the grammar uses & and ~ {num_operators} times; it may use them at most "
            f"{MAX_SET_OPERATORS} times"
        )
    return "".join([*parts, text[start:]])


def _tokens(text: str) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Each token that matters here: its kind, where it begins and ends, the JSON behind it."""
    position = 0
    while found := _TOKENS.search(text, position):
        kind, position = str(found.lastgroup), found.end()
        value: dict[str, Any] = {}
        if kind == "json":
            kind = found.group()
            value, position = _json_value(text, position, kind)
        yield kind, found.start(), position, value


def _json_value(text: str, position: int, keyword: str) -> tuple[dict[str, Any], int]:
    begin = _JSON_SPACE.match(text, position)
    assert begin is not None, "it matches nothing too"
    try:
        value, end = _DECODER.raw_decode(text, begin.end())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON after {keyword}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"what stands after {keyword} must be a JSON object")
    return value, end


def refuse_constant(name: str) -> object:
    """For json's parse_constant: NaN and the infinities are no JSON."""
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=refuse_constant)

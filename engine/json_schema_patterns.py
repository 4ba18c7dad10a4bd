r"""Regular expressions of a JSON schema, rewritten for llguidance. No JAX.

llguidance reads them in the dialect of Rust's regex crate. Where that means something else than
ECMA-262, which JSON Schema names, they are rewritten or refused. And what it makes of a class for
the inside of JSON's quotes is wrong where the class has all control characters: the escapes \" and
\\ pass too, whether or not the class has these characters. A control character on its own it drops:
^a\x01b$ would let "ab" pass. No output can have those without a short escape, so every class goes
without them, and elsewhere they are refused.
"""

import re

from .regex_bounds import check_repetitions

UNSPELLABLE = r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
"""Class of the characters that no output has in a string: control characters without a short escape
in JSON, and DEL, which llguidance has none of."""

_TOKENS = re.compile(
    r"""
      (?P<control>
        [\x00-\x07\x0b\x0e-\x1f\x7f] | \\[av]
      | \\(?: x | u00 | U000000 ) (?: 0[0-7bBeEfF] | 1[0-9a-fA-F] | 7[fF] )
      | \\[xuU]\{ 0* (?: [0-7bBeEfF] | 1[0-9a-fA-F] | 7[fF] ) \}
      )
    | (?P<property> \\[pP] (?: \{[^{}]*\} | . ))
    | (?P<space> \\[sS])
    | (?P<anchor> \\[Az])
    | (?P<escape> \\.)
    | (?P<class> \[ (?!\^?\]) (?: \\. | [^\\\]] )+ \])
    | (?P<bracket> \[)
    | (?P<dot> \.)
    | (?P<flags> \(\? [A-Za-z-]+ [:)])
    | (?P<stop> \(\? P?<stop>)
    | (?P<possessive> (?: [*+?] | \{[0-9,]+\} ) \+)
    """,
    re.VERBOSE | re.DOTALL,
)
_CLASS_TOKENS = re.compile(
    r"""
      (?P<space> \\[sS])
    | (?P<escape> \\.)
    | (?P<dash> - (?=\\[dDsSwWpP]))
    | (?P<operator> && | -- | ~~)
    | (?P<bracket> \[)
    """,
    re.VERBOSE | re.DOTALL,
)
_SPACES = r"\t-\r\x20\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_SPACE_CLASSES = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}
_DOT = r"[^\n\r\u2028\u2029]"


def rewritten_pattern(pattern: str) -> str:
    """A pattern that means in llguidance what this one means in ECMA-262.

    Its classes lose the characters that no output has.
    What is an error in Rust's dialect is left as it is: llguidance says so.

    Raises:
      ValueError: It uses what the two read differently and cannot be rewritten, or has too many
        repetitions; says what.
    """
    check_repetitions(pattern)
    return _TOKENS.sub(_rewritten_token, pattern)


def _rewritten_token(found: re.Match[str]) -> str:
    token = found.group()
    match found.lastgroup:
        case "class":
            return _spellable(_CLASS_TOKENS.sub(_rewritten_class_token, token[1:-1]).join("[]"))
        case "property":
            return _spellable(token)
        case "space":
            return _SPACE_CLASSES[token]
        case "dot":
            return _DOT
        case "flags" if set(token[2:-1]) == {"i"}:
            return token
        case "control":
            raise ValueError(f"it has {token!r}, a control character that no output can have")
        case "anchor":
            raise ValueError(f"{token} is an anchor in some dialects only; use ^ and $")
        case "bracket":
            raise ValueError("it has a class that is empty, begins with ] or does not end")
        case "flags":
            raise ValueError(f"it sets flags by {token!r:.20}; only i is supported")
        case "stop":
            raise ValueError("it has a group of the name stop, which llguidance takes for its own")
        case "possessive":
            raise ValueError(f"{token!r:.20} is a possessive repetition, which is not supported")
        case _:
            return token


def _rewritten_class_token(found: re.Match[str]) -> str:
    """Of what stands inside the brackets of a class, where Rust has classes in classes."""
    token = found.group()
    match found.lastgroup:
        case "space":
            return _SPACE_CLASSES[token]
        case "dash":
            return r"\-"  # nothing ranges to a whole class
        case "bracket":
            return r"\["
        case "operator":
            raise ValueError(f"it has {token} in a class, where some dialects read an operator")
        case _:
            return token


def _spellable(regex_class: str) -> str:
    return f"[{regex_class}--{UNSPELLABLE}]"

r"""Regular expressions of a JSON schema, rewritten for llguidance. No JAX.

llguidance reads them in the dialect of Rust's regex crate. Where that means something else than
ECMA-262, which JSON Schema names, they are rewritten or refused. And what it makes of a class for
the inside of JSON's quotes is wrong where the class has all control characters: the escapes \" and
\\ pass too, whether or not the class has these characters. No output can have U+0000, which has no
short escape, so every class goes without it.
"""

import re

from .regex_bounds import check_repetitions

_TOKENS = re.compile(
    r"""
      (?P<nul> \0 | \\x00 | \\u0000 | \\U00000000 | \\[xuU]\{0+\})
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
    """A pattern that means in llguidance what this one means in ECMA-262, but for U+0000.

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
            return _without_nul(_CLASS_TOKENS.sub(_rewritten_class_token, token[1:-1]).join("[]"))
        case "property":
            return _without_nul(token)
        case "space":
            return _SPACE_CLASSES[token]
        case "dot":
            return _DOT
        case "flags" if set(token[2:-1]) == {"i"}:
            return token
        case "nul":
            raise ValueError("it has the character U+0000, which no output can have")
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


def _without_nul(regex_class: str) -> str:
    return rf"[{regex_class}--\x00]"

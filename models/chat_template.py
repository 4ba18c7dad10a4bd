"""Chats to token ids through the model's Jinja template. No JAX.

Text that users wrote must never become a control token, yet a template mixes it with markup that
must. So before rendering, the characters that control tokens are spelled with are replaced, in all
text from outside, by stand-ins: private-use characters that occur nowhere in the request. A control
token is recognised only where all its punctuation came from the template; then the stand-ins give
way to what they stand for. Filters and methods (trim, split) treat a stand-in like any character,
so other text is rendered and encoded as by Hugging Face's `apply_chat_template`.

Some templates look for markup such as </think> in messages. Such a string keeps its characters
where it occurs, unless it is part of a control token's spelling.
"""

import datetime
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, override

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from .base_tokenizer import Tokenizer, check_text

MAX_TEMPLATE_CHARACTERS = 256 * 1024
MAX_RENDERED_CHARACTERS = 16 * 1024 * 1024

# Templates build markup from roles (Phi writes "<|" + role + "|>"), so only these exist.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_PRIVATE_USE = range(0x100000, 0x10FFFE)

Variables = Mapping[str, str | bool | int | float | None]


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    tokenizer: Tokenizer,
    add_generation_prompt: bool,
    now: datetime.datetime,
    variables: Variables | None = None,
) -> list[int]:
    """The prompt ids of a chat: the template's control tokens, no EOS added, at most one BOS.

    A BOS begins it if the model's files ask for one or the template makes one.

    Args:
      template: Jinja source from the model's files; code, so never a client's.
      messages: Each has a role (one of ROLES), a content, and other text fields if the template
        reads them.
      tokenizer: The model's.
      add_generation_prompt: End with what begins an answer.
      now: What a template that asks for the date is told.
      variables: What the template can be told beside the messages (enable_thinking and so on).

    Raises:
      ValueError: A message is malformed (the error names the field), the template is no valid
        one, it refuses the messages, or the result is too long.
    """
    variables = variables or {}
    _check_messages(messages)
    _check_variables(variables, reserved={*tokenizer.named_tokens, *_RESERVED})
    compiled = _compile(template, tokenizer)
    outside = [text for message in messages for text in message.values()]
    outside += [value for value in variables.values() if isinstance(value, str)]
    if sum(map(len, outside)) > MAX_RENDERED_CHARACTERS:
        raise ValueError(f"messages hold more than {MAX_RENDERED_CHARACTERS} characters")
    disguise = _Disguise(compiled, outside)
    values: dict[str, Any] = {
        name: disguise.put_on(value) if isinstance(value, str) else value
        for name, value in variables.items()
    }
    values |= tokenizer.named_tokens
    values |= {
        "messages": [
            {
                field: text if field == "role" else disguise.put_on(text)
                for field, text in message.items()
            }
            for message in messages
        ],
        "add_generation_prompt": add_generation_prompt,
        "strftime_now": now.strftime,
        "raise_exception": _raise_exception,
        # Templates ask whether they are none, and take undefined for a list.
        "tools": None,
        "documents": None,
    }
    return tokenizer.encode_rendered(_render(compiled.template, values), disguise.stand_ins)


_RESERVED = (
    "messages",
    "add_generation_prompt",
    "strftime_now",
    "raise_exception",
    "tools",
    "documents",
)


class _Compiled:
    """A template, and how it and a tokenizer see text.

    Attributes:
      template: Compiled.
      special_characters: What text from outside must not bring in.
      kept: Finds the strings that the template may look for and that cannot become a control
        token. None if there are none.
      used_characters: Of the template's own text.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ValueError(
                f"chat template has {len(source)} characters; it must have at most "
                f"{MAX_TEMPLATE_CHARACTERS}"
            )
        try:
            parsed = _ENVIRONMENT.parse(source)
            self.template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from error
        constants = [str(node.value) for node in parsed.find_all(jinja2.nodes.Const)]
        self.used_characters = frozenset(source).union(*constants)
        self.special_characters = tokenizer.special_characters
        kept = [
            text
            for text in sorted(set(constants), key=lambda text: (-len(text), text))
            if not self.special_characters.isdisjoint(text)
            and not tokenizer.can_spell_special(text)
        ]
        self.kept = re.compile(f"({'|'.join(map(re.escape, kept))})") if kept else None


@lru_cache(maxsize=16)
def _compile(source: str, tokenizer: Tokenizer) -> _Compiled:
    return _Compiled(source, tokenizer)


class _Disguise:
    """Stand-ins for the characters that control tokens are spelled with, for one chat.

    Attributes:
      stand_ins: The meaning of each stand-in.
    """

    def __init__(self, compiled: _Compiled, outside: Iterable[str]) -> None:
        used = compiled.used_characters.union(*outside)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        characters = sorted(compiled.special_characters)
        self.stand_ins = dict(zip(free, characters, strict=False))
        if len(self.stand_ins) < len(characters):
            raise ValueError("messages use too much of Unicode's private-use plane 16")
        self._table = str.maketrans({c: stand_in for stand_in, c in self.stand_ins.items()})
        self._kept = compiled.kept

    def put_on(self, text: str) -> str:
        """The text with stand-ins."""
        if self._kept is None:
            return text.translate(self._table)
        parts = self._kept.split(text)  # every other part is a kept string
        parts[::2] = [part.translate(self._table) for part in parts[::2]]
        return "".join(parts)


def _render(template: jinja2.Template, values: dict[str, Any]) -> str:
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(values):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARACTERS:
                break
    except Exception as error:  # a template is code: an absent field can raise anything
        raise ValueError(f"chat template: {error}") from error
    if length > MAX_RENDERED_CHARACTERS:
        raise ValueError(f"the rendered chat has more than {MAX_RENDERED_CHARACTERS} characters")
    return "".join(pieces)


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise ValueError("messages is empty; it must have at least 1 message")
    for i, message in enumerate(messages):
        for field in ("role", "content"):
            if field not in message:
                raise ValueError(f"messages[{i}].{field} is missing")
        for field, value in message.items():
            if not field.isidentifier():
                raise ValueError(f"messages[{i}] has a field {field!r}; it must be an identifier")
            name = f"messages[{i}].{field}"
            if not isinstance(value, str):
                raise ValueError(f"{name} is a {type(value).__name__}; it must be a string")
            check_text(value, name)
        if message["role"] not in ROLES:
            raise ValueError(
                f"messages[{i}].role is {message['role']!r}; it must be one of {', '.join(ROLES)}"
            )


def _check_variables(variables: Variables, reserved: Collection[str]) -> None:
    for name, value in variables.items():
        if name in reserved:
            raise ValueError(f"template variable {name!r} is reserved")
        if isinstance(value, str):
            check_text(value, name)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes for HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(jinja2.ext.Extension):
    """{% generation %}: marks what the model said, for training. Here its body is just rendered."""

    tags: set[str] = {"generation"}  # noqa: RUF012, declared so by Jinja

    @override
    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Configured as transformers.utils.chat_template_utils does, on which templates rely."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return environment


_ENVIRONMENT = _environment()

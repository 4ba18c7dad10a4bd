"""Chats to token ids through the model's Jinja template. No JAX.

The ids are those of Hugging Face's `apply_chat_template`, except where a message spells a control
token: there it would become one, here it stays text (see models.foreign_text).
"""

import datetime
import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, override

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from .base_tokenizer import Tokenizer, check_text
from .foreign_text import Disguise, TemplateText

MAX_TEMPLATE_CHARACTERS = 256 * 1024
MAX_RENDERED_CHARACTERS = 16 * 1024 * 1024

# Templates build markup from roles (Phi writes "<|" + role + "|>"), so only these exist.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

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
    """The prompt ids of a chat: no control tokens but those that the template makes.

    One exception: a BOS is put first if the model's files ask for one and the template makes none.

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
    foreign = [text for message in messages for text in message.values()]
    foreign += [value for value in variables.values() if isinstance(value, str)]
    if sum(map(len, foreign)) > MAX_RENDERED_CHARACTERS:
        raise ValueError(f"messages hold more than {MAX_RENDERED_CHARACTERS} characters")
    disguise = Disguise(compiled.text, foreign)
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
    return tokenizer.encode_rendered(_render(compiled.template, values), disguise.meanings)


_RESERVED = (
    "messages",
    "add_generation_prompt",
    "strftime_now",
    "raise_exception",
    "tools",
    "documents",
)


class _Compiled:
    """A template, compiled, and what its own text means for foreign text in it."""

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
        literals = {node.data for node in parsed.find_all(jinja2.nodes.TemplateData)}
        literals |= {str(node.value) for node in parsed.find_all(jinja2.nodes.Const)}
        literals |= {*tokenizer.named_tokens.values(), *ROLES}
        self.text = TemplateText(literals - {""}, tokenizer.special_spellings)


@lru_cache(maxsize=16)
def _compile(source: str, tokenizer: Tokenizer) -> _Compiled:
    return _Compiled(source, tokenizer)


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

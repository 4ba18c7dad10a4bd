"""Tokenizer: text to token ids and back, the interface and what every kind of vocabulary shares.

Control tokens (the vocabulary's special ones: turn markers, beginning and end of text) are found
here and nowhere else. A backend only ever encodes the ordinary text between them and must never
answer with a control token, so text that a user wrote cannot become one.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .added_tokens import AddedToken, TokenSplitter
from .detokenizer import IncrementalDetokenizer


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """What a model's files say about its tokenizer, apart from the vocabulary.

    Attributes:
      vocab_size: Ids of the tokenizer are [0, vocab_size); a model's embedding may have more rows.
      special_tokens: The control tokens.
      named_tokens: Spellings by the names that templates use: bos_token, eos_token and so on.
      bos_token_id: Begins a text, None if the model has none.
      eos_token_ids: End an output.
      prefix_ids: What add_special_tokens puts before a text: the BOS, or nothing.
      suffix_ids: What it puts after it.
      drops_leading_space: Encoding puts a space before a text, so decoding takes one away.
      chat_template: Jinja source, None if the model has none.
    """

    vocab_size: int
    special_tokens: tuple[AddedToken, ...]
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    drops_leading_space: bool = False
    chat_template: str | None = None


class Tokenizer(abc.ABC):
    """Text to token ids and back, for one model. Safe to use from several threads."""

    def __init__(self, settings: TokenizerSettings) -> None:
        """Stores the settings; backends load the vocabulary."""
        self._settings = settings
        self._splitter = TokenSplitter(settings.special_tokens)
        self._special_bytes = {
            token.token_id: token.text.encode() for token in settings.special_tokens
        }

    @property
    def settings(self) -> TokenizerSettings:
        """What the model's files say about it, apart from the vocabulary."""
        return self._settings

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer are [0, vocab_size)."""
        return self._settings.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, None if the model has none."""
        return self._settings.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends an output, as far as the tokenizer's files say."""
        return self._settings.eos_token_ids

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, Jinja source."""
        return self._settings.chat_template

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Spellings by the names that templates use: bos_token, eos_token and so on."""
        return self._settings.named_tokens

    @property
    def drops_leading_space(self) -> bool:
        """Whether encoding puts a space before a text, which decoding has to take away."""
        return self._settings.drops_leading_space

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The control tokens."""
        return frozenset(self._special_bytes)

    @cached_property
    def special_spellings(self) -> frozenset[str]:
        """How the control tokens are spelled."""
        return frozenset(token.text for token in self._settings.special_tokens)

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = False
    ) -> list[int]:
        """The ids of a text.

        Args:
          text: Any text that UTF-8 can carry.
          add_special_tokens: Begin and end as the model's files say. What the text spells out
            itself (with parse_special) is not doubled: there is never more than one BOS.
          parse_special: The spelling of a control token means the token. For prompts that their
            author marked up; not for text from somebody else.

        Raises:
          ValueError: The text holds a lone surrogate, or what the vocabulary cannot spell.
        """
        check_text(text, "text")
        if parse_special:
            ids = self._encode_parsed(text, {})
        else:
            ids = self._encode_text(text, is_first=True) if text else []
        if add_special_tokens:
            ids = self._with_prefix(ids)
            suffix = list(self._settings.suffix_ids)
            if suffix and ids[-len(suffix) :] != suffix:
                ids += suffix
        return ids

    def encode_rendered(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """The ids of a rendered chat: control tokens are parsed, exactly one BOS begins it.

        Args:
          text: What the template made.
          stand_ins: Characters of `text` that stand for others and are no part of a control
            token: their meaning is put in after the control tokens were found.
        """
        return self._with_prefix(self._encode_parsed(text, stand_ins))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence. Raises nothing; see models.detokenizer for the rules."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; its spelling if it is a control token.

        Empty for an id outside the vocabulary, which a model with padded embeddings can sample.
        """
        special = self._special_bytes.get(token_id)
        if special is not None:
            return special
        return self._ordinary_bytes(token_id) if 0 <= token_id < self.vocab_size else b""

    @abc.abstractmethod
    def _encode_text(self, text: str, *, is_first: bool) -> list[int]:
        """The ids of ordinary text, not empty; never a control token.

        Args:
          text: What lies between two control tokens.
          is_first: Nothing lies before it.

        Raises:
          ValueError: The vocabulary cannot spell it.
        """

    @abc.abstractmethod
    def _ordinary_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in [0, vocab_size) that is no control token."""

    def _encode_parsed(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        table = str.maketrans(dict(stand_ins))
        ids: list[int] = []
        is_first = True
        for part in self._splitter.split(text):
            if isinstance(part, AddedToken):
                ids.append(part.token_id)
            else:
                ids += self._encode_text(part.translate(table), is_first=is_first)
            is_first = False
        return ids

    def _with_prefix(self, ids: list[int]) -> list[int]:
        prefix = list(self._settings.prefix_ids)
        return ids if ids[: len(prefix)] == prefix else prefix + ids


def check_text(text: str, name: str) -> None:
    """Raises ValueError, naming the field, if UTF-8 cannot carry the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds a lone surrogate, U+{ord(text[error.start]):04X}, at character "
            f"{error.start}; it must be text that UTF-8 can carry"
        ) from None

"""The small files beside a Hugging Face vocabulary: what they say, whatever library encodes.

Read: tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja,
generation_config.json and config.json. None of them has to exist.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .added_tokens import AddedToken
from .metadata import CheckpointError, Metadata, read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, kw_only=True)
class DeclaredToken:
    """A token that the files declare beside the vocabulary.

    Attributes:
      token: It.
      is_special: A control token, not a word.
    """

    token: AddedToken
    is_special: bool


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What the files say.

    Attributes:
      config: tokenizer_config.json.
      named_tokens: Spellings of bos_token, eos_token, unk_token and pad_token, those that are set.
      special_spellings: Those, and every other spelling that is named as special.
      declared_tokens: Tokens with their ids, by id.
      eos_token_ids: Of generation_config.json and config.json.
      chat_template: Jinja source, None if there is none.
    """

    config: Metadata
    named_tokens: Mapping[str, str]
    special_spellings: frozenset[str]
    declared_tokens: Mapping[int, DeclaredToken]
    eos_token_ids: frozenset[int]
    chat_template: str | None

    @staticmethod
    def read(folder: Path) -> "TokenizerFiles":
        """Reads the files of a folder; raises CheckpointError for one that is malformed."""
        config = read_json(folder / "tokenizer_config.json", is_optional=True)
        special_map = read_json(folder / "special_tokens_map.json", is_optional=True)
        named = {}
        for name in _NAMES:
            for metadata in (config, special_map):
                if name not in named and metadata.get(name) is not None:
                    named[name] = _spelling(metadata, name, metadata.get(name))
        others = {text for metadata in (config, special_map) for text in _other_spellings(metadata)}
        eos_token_ids = frozenset[int]()
        for name in ("generation_config.json", "config.json"):
            eos_token_ids |= read_json(folder / name, is_optional=True).token_ids("eos_token_id")
        return TokenizerFiles(
            config=config,
            named_tokens=named,
            special_spellings=frozenset(named.values()) | others,
            declared_tokens=_declared_tokens(folder, config),
            eos_token_ids=eos_token_ids,
            chat_template=_chat_template(folder, config),
        )

    def eos_token_ids_with(self, token_id: int | None) -> frozenset[int]:
        """`eos_token_ids` and the one that the tokenizer names, if it does."""
        return self.eos_token_ids if token_id is None else self.eos_token_ids | {token_id}

    def with_override(
        self, ids: tuple[int, ...], key: str, token_id: int | None
    ) -> tuple[int, ...]:
        """`ids`, unless tokenizer_config.json says whether to add this token.

        Args:
          ids: What the vocabulary's own file puts there.
          key: add_bos_token or add_eos_token.
          token_id: The token in question.

        Raises:
          CheckpointError: The token is to be added and there is none.
        """
        if self.config.get(key) is None:
            return ids
        if not self.config.boolean(key, default=False):
            return tuple(i for i in ids if i != token_id)
        if token_id is None:
            raise CheckpointError(
                f"{self.config.source}: {key} is true, but no such token is named"
            )
        return ids if token_id in ids else (token_id,)


def _declared_tokens(folder: Path, config: Metadata) -> dict[int, DeclaredToken]:
    declared = {}
    plain = read_json(folder / "added_tokens.json", is_optional=True)
    for text, token_id in plain.values.items():
        if not isinstance(token_id, int) or not text:
            raise plain.error(text, "a token id")
        declared[token_id] = DeclaredToken(
            token=AddedToken(token_id=token_id, text=text), is_special=False
        )
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        return declared
    if not isinstance(decoder, dict):
        raise config.error("added_tokens_decoder", "a mapping from ids to tokens")
    for key, value in decoder.items():
        if not key.isdecimal() or not isinstance(value, dict):
            raise config.error("added_tokens_decoder", "a mapping from ids to tokens")
        flags = Metadata(value, config.source)
        declared[int(key)] = DeclaredToken(
            token=AddedToken(
                token_id=int(key),
                text=_spelling(config, "added_tokens_decoder", value),
                lstrip=flags.boolean("lstrip", default=False),
                rstrip=flags.boolean("rstrip", default=False),
                single_word=flags.boolean("single_word", default=False),
            ),
            is_special=flags.boolean("special", default=False),
        )
    return declared


def _other_spellings(metadata: Metadata) -> Iterator[str]:
    """Special tokens beyond the four names: a list of them, or a mapping from further names."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = metadata.get(key)
        if value is None:
            continue
        tokens = list(value.values()) if isinstance(value, dict) else value
        if not isinstance(tokens, list):
            raise metadata.error(key, "a list of tokens")
        for token in tokens:
            yield _spelling(metadata, key, token)


def _chat_template(folder: Path, config: Metadata) -> str | None:
    """chat_template.jinja, else chat_template of tokenizer_config.json: the one named default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: not readable as text: {error}") from error
    value = config.get("chat_template")
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        by_name = {each.get("name"): each.get("template") for each in value}
        value = by_name.get("default")
    if value is not None and not isinstance(value, str):
        raise config.error("chat_template", "a template, or a list of named ones")
    return value


def _spelling(metadata: Metadata, key: str, value: object) -> str:
    """The spelling of a token that is written as a string or as {"content": string}."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise metadata.error(key, "a token, which is a string or has a content")
    return text

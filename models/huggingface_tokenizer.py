"""Tokenizers that run on Hugging Face's `tokenizers` library, and those in a tokenizer.json."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from .added_tokens import AddedToken
from .base_tokenizer import Tokenizer, TokenizerSettings
from .metadata import CheckpointError
from .piece_bytes import SPACE_MARK, PieceBytes, byte_level_bytes, marked_space_bytes
from .tokenizer_files import TokenizerFiles


class LibraryTokenizer(Tokenizer):
    """A tokenizer whose vocabulary the `tokenizers` library holds."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        settings: TokenizerSettings,
        *,
        piece_of: Callable[[int], str | None],
        piece_bytes: PieceBytes,
        literal_ids: frozenset[int],
        unknown_token_id: int | None = None,
        continuation: tokenizers.Tokenizer | None = None,
    ) -> None:
        """Wraps a library tokenizer and takes it over.

        Args:
          library: Splits and encodes ordinary text.
          settings: See there.
          piece_of: The piece of an id, None if it has none.
          piece_bytes: How pieces stand for bytes.
          literal_ids: Added tokens: their pieces are spelled as they are.
          unknown_token_id: What text that the vocabulary lacks becomes. The one special token
            that ordinary text may turn into.
          continuation: Encodes text that is not the first, if that differs (a space is put before
            the first alone). None: `library` does.
        """
        super().__init__(settings)
        self._first = library
        self._rest = continuation or library
        for each in (self._first, self._rest):
            each.encode_special_tokens = True  # spelled-out control tokens are ordinary text
            each.no_truncation()
            each.no_padding()
        self._piece_of = piece_of
        self._piece_bytes = piece_bytes
        self._literal_ids = literal_ids
        self._control_ids = self.special_token_ids - {unknown_token_id}

    def _encode_text(self, text: str, *, is_first: bool) -> list[int]:
        library = self._first if is_first else self._rest
        # `encode` holds the GIL to the end, half a second for a MiB, and with it every stream of a
        # server. A batch of one lets it go.
        try:
            (encoding,) = library.encode_batch([text], add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"this model's vocabulary cannot encode the text: {error}") from error
        forged = [
            offsets
            for token_id, offsets in zip(encoding.ids, encoding.offsets, strict=True)
            if token_id in self._control_ids
        ]
        if not forged:
            return encoding.ids
        # The vocabulary itself spells a control token like ordinary text (Unigram models do, and
        # BPE that looks whole words up). Encode the text in parts that break such spellings.
        ids: list[int] = []
        start = 0
        for cut in [(begin + end) // 2 for begin, end in forged]:
            if cut == start:
                raise ValueError(
                    f"text holds {text[start : start + 1]!r}, which this model's vocabulary can "
                    "only encode as a control token"
                )
            ids += self._encode_text(text[start:cut], is_first=is_first and start == 0)
            start = cut
        return ids + self._encode_text(text[start:], is_first=False)

    def _ordinary_bytes(self, token_id: int) -> bytes:
        piece = self._piece_of(token_id)
        if piece is None:
            return b""
        return piece.encode() if token_id in self._literal_ids else self._piece_bytes(piece)


def load_huggingface_tokenizer(folder: Path) -> LibraryTokenizer:
    """The tokenizer of a folder with a tokenizer.json.

    Whether BOS and EOS are added is for tokenizer.json to say, unless tokenizer_config.json does.

    Raises:
      CheckpointError: The files contradict each other, or need something that is not supported.
    """
    source = folder / "tokenizer.json"
    try:
        library = tokenizers.Tokenizer.from_file(str(source))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{source}: not a tokenizer.json: {error}") from error
    description = json.loads(source.read_text(encoding="utf-8"))
    files = TokenizerFiles.read(folder)
    for token_id, declared in files.declared_tokens.items():
        if library.id_to_token(token_id) != declared.token.text:
            raise CheckpointError(
                f"{files.config.source}: declares {declared.token.text!r} as token {token_id}, "
                f"which is {library.id_to_token(token_id)!r} in tokenizer.json"
            )
    named_ids = {name: library.token_to_id(text) for name, text in files.named_tokens.items()}
    bos, eos = named_ids.get("bos_token"), named_ids.get("eos_token")
    prefix, suffix = _template_ids(library)
    piece_bytes, drops_leading_space = _piece_bytes(description.get("decoder"), source)
    unknown = _unknown_token_id(description["model"], library)
    settings = TokenizerSettings(
        vocab_size=max(library.get_vocab(with_added_tokens=True).values()) + 1,
        special_tokens=_special_tokens(library, files.special_spellings, source),
        named_tokens=files.named_tokens,
        bos_token_id=bos,
        eos_token_ids=files.eos_token_ids_with(eos),
        prefix_ids=files.with_override(prefix, "add_bos_token", bos),
        suffix_ids=files.with_override(suffix, "add_eos_token", eos),
        drops_leading_space=drops_leading_space,
        chat_template=files.chat_template,
    )
    return LibraryTokenizer(
        library,
        settings,
        piece_of=library.id_to_token,
        piece_bytes=piece_bytes,
        literal_ids=frozenset(library.get_added_tokens_decoder()),
        unknown_token_id=None if unknown in {bos, *settings.eos_token_ids} else unknown,
        continuation=_continuation(description),
    )


def _special_tokens(
    library: tokenizers.Tokenizer, spellings: frozenset[str], source: Path
) -> tuple[AddedToken, ...]:
    """The control tokens: added tokens that are marked so, and every spelling named as special."""
    tokens = {}
    for token_id, added in library.get_added_tokens_decoder().items():
        if not added.special and added.content not in spellings:
            continue
        normalizer = library.normalizer
        if (
            added.normalized
            and normalizer is not None
            and normalizer.normalize_str(added.content) != added.content
        ):
            raise CheckpointError(
                f"{source}: the special token {added.content!r} is matched in normalized text, "
                "where it is spelled differently; that is not supported"
            )
        tokens[added.content] = AddedToken(
            token_id=token_id,
            text=added.content,
            lstrip=added.lstrip,
            rstrip=added.rstrip,
            single_word=added.single_word,
        )
    for text in spellings - tokens.keys():
        token_id = library.token_to_id(text)
        if token_id is not None:
            tokens[text] = AddedToken(token_id=token_id, text=text)
    return tuple(tokens.values())


def _template_ids(library: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    encoding = library.encode("a", add_special_tokens=True)
    owners = list(zip(encoding.ids, encoding.sequence_ids, strict=True))
    prefix = itertools.takewhile(lambda owner: owner[1] is None, owners)
    suffix = itertools.takewhile(lambda owner: owner[1] is None, reversed(owners))
    return tuple(i for i, _ in prefix), tuple(i for i, _ in suffix)[::-1]


def _piece_bytes(decoder: dict[str, Any] | None, source: Path) -> tuple[PieceBytes, bool]:
    """How pieces stand for bytes, and whether decoding takes a leading space away.

    Raises CheckpointError for a decoder that is not the concatenation of each token's bytes.
    """
    steps = _flattened(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes, False
    if kinds == ["Metaspace"] and steps[0]["replacement"] == SPACE_MARK:
        return marked_space_bytes, steps[0].get("prepend_scheme", "always") != "never"
    is_sentencepiece = kinds[:1] == ["Replace"] and set(kinds[1:]) <= {
        "ByteFallback",
        "Fuse",
        "Strip",
    }
    if is_sentencepiece and steps[0]["pattern"] == {"String": SPACE_MARK}:
        strips = [step for step in steps if step["type"] == "Strip"]
        if all((s["content"], s["start"], s["stop"]) == (" ", 1, 0) for s in strips):
            return marked_space_bytes, bool(strips)
    raise CheckpointError(
        f"{source}: decoder is {json.dumps(decoder)}; it must be ByteLevel, Metaspace, or "
        "SentencePiece's sequence of Replace, ByteFallback, Fuse and Strip"
    )


def _flattened(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [flat for each in step["decoders"] for flat in _flattened(each)]


def _unknown_token_id(model: dict[str, Any], library: tokenizers.Tokenizer) -> int | None:
    if model.get("unk_id") is not None:  # Unigram
        return model["unk_id"]
    unknown = model.get("unk_token")  # the other kinds
    return None if unknown is None else library.token_to_id(unknown)


def _continuation(description: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """The same tokenizer without a space before the text, if one goes before the first text alone.

    The library tells the first text by its offset in the input; it sees our parts one by one.
    """
    changed = json.loads(json.dumps(description), object_hook=_without_first_space)
    return None if changed == description else tokenizers.Tokenizer.from_str(json.dumps(changed))


def _without_first_space(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type") == "Metaspace" and value.get("prepend_scheme") == "first":
        return value | {"prepend_scheme": "never"}
    return value

"""Tokenizers whose vocabulary is in a GGUF file: byte-level BPE and SentencePiece.

Source: the keys are those of the GGUF specification; what an absent key means is as in llama.cpp's
llama-vocab.cpp. How text is split into words is as in each model's own tokenizer.json.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from .added_tokens import AddedToken
from .base_tokenizer import Tokenizer, TokenizerSettings
from .gguf_config import eos_token_ids
from .gguf_file import read_gguf
from .huggingface_tokenizer import LibraryTokenizer
from .metadata import CheckpointError, Metadata, check_token_ids
from .piece_bytes import SPACE_MARK, byte_level_bytes
from .sentencepiece_tokenizer import SentencePieceTokenizer, control_tokens, sentencepiece_pb

# Values of tokenizer.ggml.token_type; SentencePiece's piece types have the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_TOKEN_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True, kw_only=True)
class _WordSplit:
    """How a family of byte-level BPE models prepares text, by its tokenizer.ggml.pre.

    Attributes:
      steps: Makes the pre-tokenizers that come before the byte-level one.
      uses_gpt2_words: The byte-level one splits as GPT-2 does.
      looks_up_whole_words: A word that is in the vocabulary is not merged from its bytes.
      composes_unicode: Text is brought into Unicode's composed form, NFC.
      adds_bos: A BOS is added if the file does not say.
    """

    steps: Callable[[], list[pre_tokenizers.PreTokenizer]] = list
    uses_gpt2_words: bool = False
    looks_up_whole_words: bool = False
    composes_unicode: bool = False
    adds_bos: bool = False


def _split_by(pattern: str) -> Callable[[], list[pre_tokenizers.PreTokenizer]]:
    return lambda: [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")]


def _words(digits: str) -> str:
    """Llama 3's pattern, with its digit groups."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_WORD_SPLITS = {
    "gpt-2": _WordSplit(uses_gpt2_words=True),
    "smollm": _WordSplit(
        steps=lambda: [pre_tokenizers.Digits(individual_digits=True)], uses_gpt2_words=True
    ),
    "llama-bpe": _WordSplit(
        steps=_split_by(_words(r"\p{N}{1,3}")), looks_up_whole_words=True, adds_bos=True
    ),
    "qwen2": _WordSplit(steps=_split_by(_words(r"\p{N}")), composes_unicode=True),
}


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
      CheckpointError: The file has no vocabulary, one of an unknown kind, or a damaged one.
    """
    metadata = read_gguf(path).metadata
    kinds = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in kinds:
        raise metadata.error("tokenizer.ggml.model", f"one of {', '.join(kinds)}")
    return kinds[kind](metadata, _Vocabulary.read(metadata))


@dataclass(frozen=True)
class _Vocabulary:
    """Spelling and type of each token, by id."""

    tokens: list[str]
    types: list[int]

    @staticmethod
    def read(metadata: Metadata) -> "_Vocabulary":
        tokens = _list(metadata, "tokenizer.ggml.tokens")
        for token_id, token in enumerate(tokens):
            if not isinstance(token, str) or not token:
                raise CheckpointError(
                    f"{metadata.source}: tokenizer.ggml.tokens[{token_id}] is {token!r}; "
                    "it must be a spelling"
                )
        types = _parallel_list(metadata, "tokenizer.ggml.token_type", len(tokens))
        return _Vocabulary(tokens, types)

    def of_type(self, *kinds: int) -> dict[int, str]:
        """Spellings of the tokens of these types, by id."""
        pairs = zip(self.tokens, self.types, strict=True)
        return {token_id: token for token_id, (token, t) in enumerate(pairs) if t in kinds}


def _byte_level_bpe(metadata: Metadata, vocabulary: _Vocabulary) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    split = _WORD_SPLITS.get(pre) if isinstance(pre, str) else None
    if split is None:
        raise metadata.error("tokenizer.ggml.pre", f"one of {', '.join(_WORD_SPLITS)}")
    # Control tokens and unused ones are left out, so that no text can become one.
    ids = {token: token_id for token_id, token in vocabulary.of_type(NORMAL, USER_DEFINED).items()}
    try:
        library = tokenizers.Tokenizer(
            models.BPE(
                ids,
                [_merge(each) for each in _list(metadata, "tokenizer.ggml.merges")],
                ignore_merges=split.looks_up_whole_words,
            )
        )
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{metadata.source}: tokenizer.ggml.merges do not fit the tokens: {error}"
        ) from error
    if split.composes_unicode:
        library.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=metadata.boolean("tokenizer.ggml.add_space_prefix", default=False),
        use_regex=split.uses_gpt2_words,
    )
    library.pre_tokenizer = pre_tokenizers.Sequence([*split.steps(), byte_level])
    user_defined = vocabulary.of_type(USER_DEFINED)
    library.add_tokens(
        [tokenizers.AddedToken(text, normalized=False) for text in user_defined.values()]
    )
    special = tuple(
        AddedToken(token_id=token_id, text=text)
        for token_id, text in vocabulary.of_type(CONTROL, UNKNOWN).items()
    )
    tokens = vocabulary.tokens
    return LibraryTokenizer(
        library,
        _settings(metadata, vocabulary, special, adds_bos=split.adds_bos),
        piece_of=tokens.__getitem__,
        piece_bytes=byte_level_bytes,
        literal_ids=frozenset(user_defined),
    )


def _sentencepiece(metadata: Metadata, vocabulary: _Vocabulary) -> Tokenizer:
    model = sentencepiece_pb.ModelProto()
    scores = _parallel_list(metadata, "tokenizer.ggml.scores", len(vocabulary.tokens))
    unknown = metadata.integer("tokenizer.ggml.unknown_token_id", 0)
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == USER_DEFINED:
            # Converters write user-defined tokens with plain spaces, the library looks for marks.
            token = token.replace(" ", SPACE_MARK)
        # Gemma's converter marks the unknown token as a control token.
        kind = UNKNOWN if token_id == unknown else kind
        model.pieces.add(piece=token, score=scores[token_id], type=kind)
    model.trainer_spec.model_type = sentencepiece_pb.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = BYTE in vocabulary.types
    model.trainer_spec.unk_id = unknown
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.escape_whitespaces = True
    model.normalizer_spec.add_dummy_prefix = metadata.boolean(
        "tokenizer.ggml.add_space_prefix", default=True
    )
    model.normalizer_spec.remove_extra_whitespaces = metadata.boolean(
        "tokenizer.ggml.remove_extra_whitespaces", default=False
    )
    special = tuple(control_tokens(model).values())
    return SentencePieceTokenizer(
        model,
        _settings(
            metadata,
            vocabulary,
            special,
            adds_bos=True,
            drops_leading_space=model.normalizer_spec.add_dummy_prefix,
        ),
        spaces_every_part=True,
    )


def _settings(
    metadata: Metadata,
    vocabulary: _Vocabulary,
    special: tuple[AddedToken, ...],
    *,
    adds_bos: bool,
    drops_leading_space: bool = False,
) -> TokenizerSettings:
    named_ids = {
        name: metadata.integer(f"tokenizer.ggml.{key}")
        for name, key in _TOKEN_NAMES.items()
        if metadata.get(f"tokenizer.ggml.{key}") is not None
    }
    end_ids = eos_token_ids(metadata)
    check_token_ids({*named_ids.values(), *end_ids}, len(vocabulary.tokens), metadata.source)
    bos, eos = named_ids.get("bos_token"), named_ids.get("eos_token")
    adds_bos = metadata.boolean("tokenizer.ggml.add_bos_token", default=adds_bos)
    adds_eos = metadata.boolean("tokenizer.ggml.add_eos_token", default=False)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise metadata.error("tokenizer.chat_template", "a template")
    return TokenizerSettings(
        vocab_size=len(vocabulary.tokens),
        special_tokens=special,
        named_tokens={name: vocabulary.tokens[i] for name, i in named_ids.items()},
        bos_token_id=bos,
        eos_token_ids=end_ids,
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        suffix_ids=(eos,) if adds_eos and eos is not None else (),
        drops_leading_space=drops_leading_space,
        chat_template=template,
    )


def _parallel_list(metadata: Metadata, key: str, length: int) -> list[Any]:
    """A list with one entry for each token."""
    values = _list(metadata, key)
    if len(values) != length:
        raise CheckpointError(
            f"{metadata.source}: {key} has {len(values)} entries; it must have {length}, "
            "one for each token"
        )
    return values


def _list(metadata: Metadata, key: str) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list):
        raise metadata.error(key, "a list")
    return values


def _merge(text: object) -> tuple[str, str]:
    """The two halves of "left right"; a half can begin with a space, but not hold one."""
    left, _, right = str(text)[1:].partition(" ")
    return str(text)[:1] + left, right

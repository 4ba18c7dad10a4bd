"""Tokenizers that run on the sentencepiece library, and those in a tokenizer.model."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from .added_tokens import AddedToken, TokenSplitter
from .base_tokenizer import Tokenizer, TokenizerSettings
from .metadata import CheckpointError
from .piece_bytes import marked_space_bytes
from .tokenizer_files import TokenizerFiles

# The library's own protobuf module, generated without types.
sentencepiece_pb: Any = sentencepiece_model_pb2


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer whose vocabulary the sentencepiece library holds.

    The library never turns text into a control token, and always turns the spelling of a
    user-defined token into that.
    """

    def __init__(
        self,
        model: Any,
        settings: TokenizerSettings,
        *,
        spaces_every_part: bool,
        added_tokens: Collection[AddedToken] = (),
    ) -> None:
        """Loads a model.

        Args:
          model: A ModelProto: the vocabulary and how text is normalized.
          settings: See there.
          spaces_every_part: If the model puts a space before a text: put one after each control
            token too, not only at the beginning.
          added_tokens: Tokens beside the model that are no control tokens.
        """
        super().__init__(settings)
        self._pieces = [piece.piece for piece in model.pieces]
        self._added_bytes = {token.token_id: token.text.encode() for token in added_tokens}
        self._added_splitter = TokenSplitter(added_tokens)
        self._first = self._rest = _processor(model)
        if model.normalizer_spec.add_dummy_prefix and not spaces_every_part:
            without_space = sentencepiece_pb.ModelProto()
            without_space.CopyFrom(model)
            without_space.normalizer_spec.add_dummy_prefix = False
            self._rest = _processor(without_space)

    def _encode_text(self, text: str, *, is_first: bool) -> list[int]:
        ids: list[int] = []
        for part in self._added_splitter.split(text):
            if isinstance(part, AddedToken):
                ids.append(part.token_id)
            else:
                ids += (self._first if is_first else self._rest).encode(part)
            is_first = False
        return ids

    def _ordinary_bytes(self, token_id: int) -> bytes:
        added = self._added_bytes.get(token_id)
        if added is not None:
            return added
        if token_id >= len(self._pieces):
            return b""
        return marked_space_bytes(self._pieces[token_id])


def load_sentencepiece_tokenizer(folder: Path) -> SentencePieceTokenizer:
    """The tokenizer of a folder with a tokenizer.model.

    What tokenizer_config.json leaves out is as in Hugging Face's Llama tokenizer: a BOS and no EOS
    is added, and `legacy` is true, which puts a space after each control token.

    Raises:
      CheckpointError: The model is damaged, or the files beside it contradict it.
    """
    source = folder / "tokenizer.model"
    model = sentencepiece_pb.ModelProto()
    try:
        model.ParseFromString(source.read_bytes())
    except Exception as error:  # protobuf's DecodeError derives from Exception alone
        raise CheckpointError(f"{source}: not a SentencePiece model: {error}") from error
    files = TokenizerFiles.read(folder)
    ids = {piece.piece: token_id for token_id, piece in enumerate(model.pieces)}
    for token_id, declared in files.declared_tokens.items():
        text = declared.token.text
        if token_id < len(model.pieces) and model.pieces[token_id].piece != text:
            raise CheckpointError(
                f"{files.config.source}: declares {text!r} as token {token_id}, "
                f"which is {model.pieces[token_id].piece!r} in tokenizer.model"
            )
        ids[text] = token_id
    named = {
        name: text
        for name, text in {**_default_names(model), **files.named_tokens}.items()
        if text in ids
    }
    bos = ids[named["bos_token"]] if "bos_token" in named else None
    eos = ids[named["eos_token"]] if "eos_token" in named else None
    special = control_tokens(model)
    special |= {
        token_id: declared.token
        for token_id, declared in files.declared_tokens.items()
        if declared.is_special
    }
    for text in files.special_spellings & ids.keys():
        special.setdefault(ids[text], AddedToken(token_id=ids[text], text=text))
    settings = TokenizerSettings(
        vocab_size=max(ids.values()) + 1,
        special_tokens=tuple(special.values()),
        named_tokens=named,
        bos_token_id=bos,
        eos_token_ids=files.eos_token_ids_with(eos),
        prefix_ids=files.with_override((bos,) if bos is not None else (), "add_bos_token", bos),
        suffix_ids=files.with_override((), "add_eos_token", eos),
        drops_leading_space=model.normalizer_spec.add_dummy_prefix,
        chat_template=files.chat_template,
    )
    return SentencePieceTokenizer(
        model,
        settings,
        spaces_every_part=files.config.boolean("legacy", default=True),
        added_tokens=[
            declared.token
            for token_id, declared in files.declared_tokens.items()
            if token_id not in special and token_id >= len(model.pieces)
        ],
    )


def control_tokens(model: Any) -> dict[int, AddedToken]:
    """The control tokens of a ModelProto and its unknown token, by id."""
    types = sentencepiece_pb.ModelProto.SentencePiece
    return {
        token_id: AddedToken(token_id=token_id, text=piece.piece)
        for token_id, piece in enumerate(model.pieces)
        if piece.type in (types.CONTROL, types.UNKNOWN)
    }


def _default_names(model: Any) -> dict[str, str]:
    spec = model.trainer_spec
    return {"bos_token": spec.bos_piece, "eos_token": spec.eos_piece, "unk_token": spec.unk_piece}


def _processor(model: Any) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

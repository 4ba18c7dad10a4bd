"""Guides over a vocabulary of single bytes: whether they let a text through, from end to end."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from octavo.engine.guided_masks import GuideError
from octavo.engine.guides import Guides
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.models.base_tokenizer import Tokenizer, TokenizerSettings

END_ID = 256


class ByteTokenizer(Tokenizer):
    def __init__(self) -> None:
        super().__init__(TokenizerSettings(vocab_size=256, special_tokens=()))

    def _encode_text(self, text: str, *, is_first: bool) -> list[int]:
        return list(text.encode())

    def _ordinary_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


@cache
def byte_guides() -> Guides:
    return Guides(ByteTokenizer(), vocab_size=257, eos_token_ids={END_ID})


def lets_through(guide: Guide) -> Callable[[str], bool]:
    """Tells whether the guide lets a text through to its end; raises ValueError as `start` does."""
    byte_guides().check(guide)

    def lets_text_through(text: str) -> bool:
        state = byte_guides().start(guide)
        with suppress(GuideError):
            for token_id in (*text.encode(), END_ID):
                state.take(token_id)
            return True
        return False

    return lets_text_through


def schema_lets_through(schema: Any) -> Callable[[str], bool]:
    text = json.dumps(schema, ensure_ascii=False)
    return lets_through(Guide(kind=GuideKind.JSON_SCHEMA, text=text))

"""The text side of a real model: its tokenizer, chat template and detokenizer in one place."""

import datetime
from collections.abc import Callable, Sequence

from ..models.chat_template import render_chat
from ..models.detokenizer import IncrementalDetokenizer
from ..models.tokenizer import Tokenizer


class ModelCodec:
    """A TextCodec (see served_model) over models.tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, now: Callable[[], datetime.datetime]) -> None:
        """Uses this tokenizer, and `now` for chat templates that ask for the date."""
        self._tokenizer = tokenizer
        self._now = now

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings one."""
        return self._tokenizer.chat_template is not None

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> list[int]:
        """See TextCodec."""
        return self._tokenizer.encode(
            text, add_special_tokens=add_special_tokens, parse_special=parse_special_tokens
        )

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """See TextCodec."""
        template = self._tokenizer.chat_template
        if template is None:
            raise ValueError("the model has no chat template")
        return render_chat(
            template,
            [{"role": role, "content": content} for role, content in messages],
            tokenizer=self._tokenizer,
            add_generation_prompt=True,
            now=self._now(),
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See TextCodec."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def stream_decoder(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> IncrementalDetokenizer:
        """See TextCodec."""
        return IncrementalDetokenizer(
            self._tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens
        )

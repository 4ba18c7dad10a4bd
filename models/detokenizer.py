"""From token ids to text, a few at a time. No JAX.

A token is bytes, and text is the bytes of all tokens decoded as UTF-8. So the state is an
incremental UTF-8 decoder that holds back the 0 to 3 bytes of an unfinished character: each token
costs its own length, whatever came before, and no id sequence can raise or lose text.

Policy for bytes that are not UTF-8: each maximal subpart of an ill-formed sequence becomes one
U+FFFD, as the WHATWG and Unicode (section 3.9) say; so does a character that the output leaves
unfinished at its end. Streams and whole texts follow the same rule, for `Tokenizer.decode` is this
class, pushed once.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

_MOST_PENDING_BYTES = 3


@runtime_checkable
class TokenBytes(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that carry no text of their own."""
        ...

    @property
    def drops_leading_space(self) -> bool:
        """Whether encoding puts a space before a text, which decoding has to take away."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id that is none."""
        ...


class IncrementalDetokenizer:
    """The text of one output, delta by delta.

    All deltas and the flush, joined, are the text of the output ids in the context of the prompt,
    however the ids are cut into pushes. The prompt's own text never comes out. A character that
    begins in the prompt and ends in the output comes out once, when it is complete; if the output
    does not continue it, it was the prompt's and does not come out.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """A detokenizer for what follows `prompt_token_ids`.

        Args:
          tokenizer: Gives the bytes of a token.
          prompt_token_ids: The context. Only its last bytes matter, and whether it has any.
          skip_special_tokens: Leave out the text of special tokens.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._tail(prompt_token_ids)
        self._decoder.decode(tail)
        self._prompt_pending = self._decoder.getstate()[0]
        self._drops_space = tokenizer.drops_leading_space and not tail

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        data = b"".join(map(self._bytes, token_ids))
        if not data:
            return ""
        if self._prompt_pending:
            self._drop_broken_prompt_character(data[:1])
        if self._drops_space:
            self._drops_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end of the text: U+FFFD if the output ends inside a character, else nothing.

        The detokenizer is at the start of a character afterwards.
        """
        if self._prompt_pending:  # no output byte came: what is pending is the prompt's
            self._prompt_pending = b""
            self._decoder.reset()
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)

    def _tail(self, token_ids: Sequence[int]) -> bytes:
        """The end of the prompt's bytes, enough to hold any unfinished character."""
        tail = b""
        for token_id in reversed(token_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= _MOST_PENDING_BYTES:
                break
        return tail[-_MOST_PENDING_BYTES:]

    def _drop_broken_prompt_character(self, first_byte: bytes) -> None:
        """Forgets the prompt's unfinished character unless the output goes on with it."""
        # A character, whole or cut off, decodes to one; a second one says that the byte broke it.
        if len((self._prompt_pending + first_byte).decode(errors="replace")) > 1:
            self._decoder.reset()
        self._prompt_pending = b""

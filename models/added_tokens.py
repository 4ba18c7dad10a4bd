"""Added tokens: found in text by their spelling, before the vocabulary splits the rest.

Source: the matching rules are those of Hugging Face tokenizers' `AddedVocabulary`: leftmost, then
longest; `single_word`, `lstrip` and `rstrip` as there.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

# What Unicode calls White_Space; str.strip() would also take the separators 0x1C to 0x1F.
_WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token with a fixed spelling.

    Attributes:
      token_id: Its id.
      text: Its spelling, never empty.
      lstrip: It swallows the white space before it.
      rstrip: It swallows the white space after it.
      single_word: It counts only where no word character touches it.
    """

    token_id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class TokenSplitter:
    """Splits text at the spellings of given tokens.

    A vocabulary may have thousands of them (Gemma has 6,249 control tokens), so a position costs
    one look-up for each different length, not one comparison for each token.
    """

    def __init__(self, tokens: Collection[AddedToken]) -> None:
        """A splitter for these tokens; none is fine."""
        self._by_text = {token.text: token for token in tokens}
        self._lengths = sorted({len(text) for text in self._by_text}, reverse=True)
        first_characters = "".join({re.escape(text[0]) for text in self._by_text})
        self._first_character = re.compile(f"[{first_characters}]") if first_characters else None

    def split(self, text: str) -> Iterator[str | AddedToken]:
        """The parts of `text` in order: tokens, and the text between them, never empty."""
        if self._first_character is None:
            if text:
                yield text
            return
        start = position = 0
        while found := self._first_character.search(text, position):
            token = self._token_at(text, found.start())
            if token is None:
                position = found.start() + 1
                continue
            position = found.start() + len(token.text)
            before = text[start : found.start()]
            if token.lstrip:
                before = before.rstrip(_WHITE_SPACE)
            if before:
                yield before
            yield token
            if token.rstrip:
                while position < len(text) and text[position] in _WHITE_SPACE:
                    position += 1
            start = position
        if start < len(text):
            yield text[start:]

    def _token_at(self, text: str, start: int) -> AddedToken | None:
        for length in self._lengths:
            token = self._by_text.get(text[start : start + length])
            if token is not None:
                if token.single_word and _touches_word(text, start, start + length):
                    return None
                return token
        return None


def _touches_word(text: str, start: int, end: int) -> bool:
    neighbours = text[max(start - 1, 0) : start] + text[end : end + 1]
    return re.search(r"\w", neighbours) is not None

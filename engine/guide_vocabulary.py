"""GuideVocabulary: the tokens of a model, as llguidance asks for them. No JAX."""

from ..models.base_tokenizer import Tokenizer

# A long text that alone may come is cut anew for every mask: a constant of 100,000 characters took
# 40 ms each time.
_MAX_FORCED_BYTES = 512
_NUM_UNSURE_TOKENS = 8

_CONTROL_MARK = b"\xff"  # begins a control token's bytes in llguidance; it begins no text


class GuideVocabulary:
    """What TokenizerWrapper asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Reads the bytes of every id."""
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        special = {*tokenizer.special_token_ids, *eos_token_ids}
        self.special_token_ids = sorted(each for each in special if each < vocab_size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        for token_id, token in enumerate(self.tokens):
            if token.startswith(_CONTROL_MARK) and token_id not in special:
                self.tokens[token_id] = b""  # an id without bytes never comes
        self._id_of = {
            token: token_id
            for token_id, token in reversed(list(enumerate(self.tokens)))
            if token and token_id not in special
        }
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids whose bytes are this text, where only it may come: as the model would cut it.

        A tokenizer may put a space before a text, which does not belong in the middle of an output.
        """
        data = text.encode() if isinstance(text, str) else text
        if len(data) > _MAX_FORCED_BYTES:
            # Only what comes next matters, and the end would be cut as if the text ended there.
            start = data[:_MAX_FORCED_BYTES].decode(errors="ignore")
            token_ids = self(start)
            return token_ids[:-_NUM_UNSURE_TOKENS] or token_ids[:1]
        drops_space = self._tokenizer.drops_leading_space and data.startswith(b" ")
        words = data[1:].decode() if drops_space else data.decode()
        try:
            token_ids = self._tokenizer.encode(words, add_special_tokens=False)
        except ValueError:  # it cannot be spelled to its end; in llguidance that would be a panic
            return self._longest_first(data)
        if b"".join(self.tokens[token_id] for token_id in token_ids) == data:
            return token_ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        """Ids of these bytes, each the longest that fits, up to a byte that no id has."""
        token_ids: list[int] = []
        at = 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._id_of), None)
            if end is None:
                break
            token_ids.append(self._id_of[data[at:end]])
            at = end
        return token_ids

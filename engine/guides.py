"""Guides: structured output through llguidance, for any tokenizer. No JAX.

A guide is compiled once and kept; every output gets a copy of it. What the library cannot hold an
output to is refused with its reason, never done by half.

JSON is written in one way, with ", " and ": " between things and no other space: a model that may
put white space anywhere can go on with nothing else.
"""

import json
from collections import OrderedDict
from functools import cached_property
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ..models.tokenizer import Tokenizer
from .guided_masks import GuideError
from .sampling_params import Guide, GuideKind
from .token_masks import Mask, full_mask, num_words, with_ids

MAX_KEPT = 64
"""Compiled guides that are kept for the next request with the same."""

MAX_REASON_CHARACTERS = 500
MAX_CHOICES = 1000
_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
# The library takes options from a schema under this key, such as one to ignore what it cannot do.
_OPTIONS_KEY = "x-guidance"


class Guides:
    """Compiles guides for one model. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """Does nothing that takes time until the first guide comes.

        Args:
          tokenizer: The model's.
          vocab_size: Of the model, which may be larger than the tokenizer's.
          eos_token_ids: Ids that end an output.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = Lock()
        self._compiled: OrderedDict[tuple[GuideKind, str], LLMatcher] = OrderedDict()

    def check(self, guide: Guide) -> None:
        """Returns if an output can be held to the guide.

        Raises:
          ValueError: It cannot; says why.
        """
        self._compile(guide)

    def start(self, guide: Guide) -> "LLGuideState":
        """The state of an output that has no token yet; raises ValueError as `check` does."""
        return LLGuideState(
            self._compile(guide).deep_copy(),
            everything=full_mask(self._vocab_size),
            ends=with_ids(np.zeros(num_words(self._vocab_size), np.int32), self._eos_token_ids),
        )

    def _compile(self, guide: Guide) -> LLMatcher:
        """The guide at its beginning; whoever follows it takes a copy."""
        key = (guide.kind, guide.text)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
                return matcher
        grammar = _grammar(guide)
        is_bad, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if is_bad or messages or matcher.is_error():
            raise ValueError(_shortened("; ".join(messages) or matcher.get_error()))
        with self._lock:
            self._compiled[key] = matcher
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """The vocabulary as the library wants it; a tenth of a second for 49,152 ids."""
        wrapper = TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size))
        return LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)


class LLGuideState:
    """How far one output is; a GuideState (see guided_masks)."""

    def __init__(self, matcher: LLMatcher, *, everything: Mask, ends: Mask) -> None:
        """At the beginning.

        Args:
          matcher: Its own.
          everything: All ids of the model.
          ends: The ids that end an output.
        """
        self._matcher = matcher
        self._everything = everything
        self._ends = ends

    def mask(self) -> Mask:
        """See GuideState."""
        matcher = self._matcher
        if matcher.is_stopped() and not matcher.is_error():
            return self._ends.copy()
        mask = np.zeros_like(self._everything)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GuideError(_shortened(matcher.get_error()))
        mask &= self._everything & ~self._ends
        return mask | self._ends if matcher.is_accepting() else mask

    def take(self, token_id: int) -> None:
        """See GuideState."""
        if not self._matcher.consume_token(token_id):
            reason = self._matcher.get_error() or "the output has ended"
            raise GuideError(_shortened(f"token {token_id} does not follow: {reason}"))


class _Vocabulary:
    """What TokenizerWrapper asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Reads the bytes of every id."""
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_token_ids, default=0)
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        special = tokenizer.special_token_ids
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
        drops_space = self._tokenizer.drops_leading_space and data.startswith(b" ")
        words = data[1:].decode() if drops_space else data.decode()
        token_ids = self._tokenizer.encode(words, add_special_tokens=False)
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


def _grammar(guide: Guide) -> str:
    """The guide in the library's own words; raises ValueError if it is none."""
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            schema = _json(guide.text, "the schema")
            if not isinstance(schema, dict):
                raise ValueError("the schema must be a JSON object")
            if _OPTIONS_KEY in schema:
                raise ValueError(f"the schema has the key {_OPTIONS_KEY!r}, which is not taken")
            return LLMatcher.grammar_from_json_schema(guide.text, overrides=_JSON_STYLE)
        case GuideKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_STYLE)
        case GuideKind.REGEX:
            return LLMatcher.grammar_from_regex(guide.text)
        case GuideKind.CHOICE:
            texts = _json(guide.text, "the choices")
            if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_CHOICES:
                raise ValueError(f"the choices must be 1 to {MAX_CHOICES} texts")
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("every choice must be a text")
            spelled = " | ".join(map(json.dumps, texts))
            return LLMatcher.grammar_from_lark(f"start: {spelled}")
        case GuideKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(guide.text)


def _json(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be read as JSON: {error}") from error


def _shortened(reason: str) -> str:
    reason = " ".join(reason.split())
    return (
        reason if len(reason) <= MAX_REASON_CHARACTERS else reason[:MAX_REASON_CHARACTERS] + "..."
    )

r"""Guides: structured output through llguidance, for any tokenizer. No JAX.

A guide is compiled once and kept; every output gets a copy of it. What the library cannot hold an
output to is refused with its reason, never done by half.

JSON is written in one way, with ", " and ": " between things and no other space: a model that may
put white space anywhere can go on with nothing else. Characters in its strings that need no escape
have none, and control characters the short ones (those that lack one never come): spelled with \u,
a name that is taken would pass for another.

A regular expression is in the dialect of Rust's regex crate, with Unicode's \d, \w and \s: an
output may have U+0663 for \d. A schema's `pattern` is in ECMA-262's (see json_schema_patterns).
"""

import json
from collections import OrderedDict
from collections.abc import Collection
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from ..models.base_tokenizer import Tokenizer, check_text
from .guide_failures import panics_as, shortened
from .guide_state import LLGuideState
from .guide_vocabulary import GuideVocabulary
from .guided_masks import GuideError
from .json_schema_checks import checked_json_schema
from .lark_grammar_checks import checked_grammar, refuse_constant
from .regex_bounds import check_repetitions
from .sampling_checks import MAX_GUIDE_CHOICES
from .sampling_params import Guide, GuideKind
from .token_masks import num_words, with_ids

MAX_KEPT = 64
"""Compiled guides that are kept for the next request with the same."""


_JSON_STYLE: dict[str, object] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}

# What one guide may take. By trial with 49,152 ids, guides made to be slow compiled in a second at
# most, took 0.4 s for a mask at most, and kept tens of MiB.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,  # else reasons hold the whole grammar
)

# Else llguidance runs ahead where only one byte may come, and behind /a+/ /a+/ that has no end: the
# first takes every a, and the second waits for one. It keeps the GIL meanwhile.
_NO_RUNNING_AHEAD = '\n%llguidance {"no_forcing": true}'


class Guides:
    """Compiles guides for one model. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """Does nothing that takes time; see `prepare`.

        Args:
          tokenizer: The model's.
          vocab_size: Of the model, which may be larger than the tokenizer's.
          eos_token_ids: Ids that end an output.

        Raises:
          ValueError: No id ends an output, or one is outside the vocabulary.
        """
        if not eos_token_ids or not all(0 <= each < vocab_size for each in eos_token_ids):
            raise ValueError(
                f"end-of-sequence ids are {sorted(eos_token_ids)}; guides need at least one, all "
                f"in [0, {vocab_size})"
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._ends = with_ids(np.zeros(num_words(vocab_size), np.int32), eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = Lock()
        self._lock = Lock()
        self._compiled: OrderedDict[tuple[GuideKind, str], LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Indexes the vocabulary, which the first guide does otherwise.

        A fifth of a second for 49,152 ids, and more for more; it keeps the GIL meanwhile.
        """
        self._indexed_vocabulary()

    def check(self, guide: Guide) -> None:
        """Returns if an output can be held to the guide.

        Raises:
          ValueError: It cannot; says why.
        """
        self._compile(guide)

    def start(self, guide: Guide) -> LLGuideState:
        """The state of an output that has no token yet; raises ValueError as `check` does."""
        return self._state(guide, self._compile(guide).deep_copy())

    def _state(self, guide: Guide, matcher: LLMatcher) -> LLGuideState:
        return LLGuideState(
            matcher,
            ends=self._ends,
            vocab_size=self._vocab_size,
            on_error=lambda: self._forget(guide),
        )

    def _compile(self, guide: Guide) -> LLMatcher:
        """The guide at its beginning; whoever follows it takes a copy."""
        key = (guide.kind, guide.text)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
                return matcher
        grammar = json.dumps({"grammars": [_grammar(guide)]}, allow_nan=False)
        with panics_as(ValueError):
            matcher = LLMatcher(self._indexed_vocabulary(), grammar, log_level=0, limits=_LIMITS)
            if matcher.is_error() or matcher.get_grammar_warnings():
                reasons = [matcher.get_error(), *matcher.get_grammar_warnings()]
                raise ValueError(shortened(" ".join(reasons)))
        try:
            # Some limits are met by the first mask only; and what it finds out, copies share.
            self._state(guide, matcher.deep_copy()).mask()
        except GuideError as error:
            raise ValueError(str(error)) from error
        with self._lock:
            self._compiled[key] = matcher
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _forget(self, guide: Guide) -> None:
        # Copies share what was found out of the grammar; where that has grown to its limit, every
        # later copy would fail too.
        with self._lock:
            self._compiled.pop((guide.kind, guide.text), None)

    def _indexed_vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                wrapper = TokenizerWrapper(
                    GuideVocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
                )
                self._vocabulary = LLTokenizer(wrapper, eos_token=self._eos_token_ids)
            return self._vocabulary


def _grammar(guide: Guide) -> dict[str, object]:
    """The guide in the library's own words; raises ValueError if it is none."""
    check_text(guide.text, "the guide")
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            schema = checked_json_schema(_json(guide.text, "the schema"))
            return {"json_schema": schema | {"x-guidance": _JSON_STYLE}}
        case GuideKind.JSON_OBJECT:
            return {"json_schema": {"type": "object", "x-guidance": _JSON_STYLE}}
        case GuideKind.REGEX:
            check_repetitions(guide.text)
            return {"lark_grammar": f"start: /{regex_to_lark(guide.text, use_ascii='')}/"}
        case GuideKind.CHOICE:
            texts = _json(guide.text, "the choices")
            if not isinstance(texts, list):
                raise ValueError("the choices must be an array of texts")
            if not 1 <= len(texts) <= MAX_GUIDE_CHOICES:
                raise ValueError(
                    f"the choices are {len(texts)} texts; they must be 1 to {MAX_GUIDE_CHOICES}"
                )
            for text in texts:
                if not isinstance(text, str):
                    raise ValueError("every choice must be a text")
                check_text(text, "a choice")
            # One terminal: a tree of characters, where rules would be tried one by one.
            spelled = " | ".join(map(_lark_string, texts))
            return {"lark_grammar": f"start: CHOICE\nCHOICE: {spelled}"}
        case GuideKind.GRAMMAR:
            if not guide.text.strip():
                raise ValueError("Empty grammar")
            grammar = checked_grammar(guide.text, _JSON_STYLE) + _NO_RUNNING_AHEAD
            return {"lark_grammar": grammar}


def _lark_string(text: str) -> str:
    """As JSON's strings are, but that DEL is escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _json(text: str, what: str) -> object:
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be read as JSON: {error}") from error

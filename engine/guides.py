r"""Guides: structured output through llguidance, for any tokenizer. No JAX.

A guide is compiled once and kept; every output gets a copy of it. What the library cannot hold an
output to is refused with its reason, never done by half.

JSON is written in one way, with ", " and ": " between things and no other space: a model that may
put white space anywhere can go on with nothing else. Characters in its strings that need no escape
have none, and control characters the short ones (those that lack one never come): spelled with \u,
a name that is taken would pass for another.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from ..models.base_tokenizer import Tokenizer, check_text
from .guided_masks import GuideError, GuideState
from .json_schema_checks import checked_json_schema
from .lark_grammar_checks import checked_grammar, refuse_constant
from .sampling_params import Guide, GuideKind
from .token_masks import Mask, has_id, num_words, with_ids

MAX_KEPT = 64
"""Compiled guides that are kept for the next request with the same."""

MAX_REASON_CHARACTERS = 500
MAX_CHOICES = 1000

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

# A long text that alone may come is cut anew for every mask: a constant of 100,000 characters took
# 40 ms each time.
_MAX_FORCED_BYTES = 512
_NUM_UNSURE_TOKENS = 8

_GOOD_ENDS = frozenset({"NoExtension", "NoExtensionBias", "EndOfSentence"})
_NOTHING_FOLLOWS = "no token of the vocabulary follows"
_CONTROL_MARK = b"\xff"  # begins a control token's bytes in llguidance; it begins no text


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

    def start(self, guide: Guide) -> "LLGuideState":
        """The state of an output that has no token yet; raises ValueError as `check` does."""
        return self._state(guide, self._compile(guide).deep_copy())

    def _state(self, guide: Guide, matcher: LLMatcher) -> "LLGuideState":
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
        with _panics_as(ValueError):
            matcher = LLMatcher(self._indexed_vocabulary(), grammar, log_level=0, limits=_LIMITS)
            if matcher.is_error() or matcher.get_grammar_warnings():
                reasons = [matcher.get_error(), *matcher.get_grammar_warnings()]
                raise ValueError(_shortened(" ".join(reasons)))
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
                    _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
                )
                self._vocabulary = LLTokenizer(wrapper, eos_token=self._eos_token_ids)
            return self._vocabulary


class LLGuideState(GuideState):
    """How far one output is. For one thread at a time."""

    def __init__(
        self, matcher: LLMatcher, *, ends: Mask, vocab_size: int, on_error: Callable[[], None]
    ) -> None:
        """At the beginning.

        Args:
          matcher: Its own.
          ends: The ids that end an output.
          vocab_size: Of the model.
          on_error: Called when the guide cannot be followed further.
        """
        self._matcher = matcher
        self._ends = ends
        self._vocab_size = vocab_size
        self._on_error = on_error
        self._has_ended = False
        self._error: str | None = None

    @property
    def is_finished(self) -> bool:
        """Nothing but an end may come, or it came."""
        return self._has_ended or self._matcher.stop_reason() in _GOOD_ENDS

    def mask(self) -> Mask:
        """Ids that may come next; where the output may end, all ids that end one are among them.

        Lets go of the GIL for most of its time.

        Raises:
          GuideError: The guide cannot be followed further, or could not be before.
        """
        with self._failures():
            if self.is_finished:
                return self._ends.copy()
            mask = np.zeros_like(self._ends)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._raise_if_stopped()
            # A grammar may name the ends itself, where the engine would take them for the end.
            mask &= ~self._ends
            if self.is_finished or self._matcher.is_accepting():
                mask |= self._ends
            if not mask.any():
                raise GuideError(_NOTHING_FOLLOWS)
            return mask

    def take(self, token_id: int) -> None:
        """The output goes on with this id, or ends with it.

        Raises:
          GuideError: It does not follow, or the guide could not be followed before.
        """
        with self._failures():
            if self._has_ended or not 0 <= token_id < self._vocab_size:
                follows = False
            elif has_id(self._ends, token_id):
                follows = self.is_finished or self._matcher.is_accepting()
                self._has_ended = follows
            else:
                follows = self._matcher.try_consume_tokens([token_id]) == 1
                self._raise_if_stopped()
            if not follows:
                raise GuideError(f"token {token_id} does not follow")

    def _raise_if_stopped(self) -> None:
        if self._matcher.is_error():
            error = _shortened(self._matcher.get_error())
            raise GuideError(_NOTHING_FOLLOWS if error in _GOOD_ENDS else error)
        reason = self._matcher.stop_reason()
        if reason != "NotStopped" and reason not in _GOOD_ENDS:
            raise GuideError(f"llguidance stopped: {reason}")

    @contextmanager
    def _failures(self) -> Generator[None]:
        """The first error stays, and whoever compiled the guide hears of it."""
        if self._error is not None:
            raise GuideError(self._error)
        try:
            with _panics_as(GuideError):
                yield
        except GuideError as error:
            self._error = str(error)
            self._on_error()
            raise


class _Vocabulary:
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
            return {"lark_grammar": f"start: /{regex_to_lark(guide.text, use_ascii='')}/"}
        case GuideKind.CHOICE:
            texts = _json(guide.text, "the choices")
            if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_CHOICES:
                raise ValueError(f"the choices must be 1 to {MAX_CHOICES} texts")
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
            return {"lark_grammar": checked_grammar(guide.text, _JSON_STYLE)}


def _lark_string(text: str) -> str:
    """As JSON's strings are, but that DEL is escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _json(text: str, what: str) -> object:
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be read as JSON: {error}") from error


def _shortened(reason: str) -> str:
    """On one line, without the library's own state, of bounded length."""
    for mark in ("<non-verbose/>", "<backtrace>", "<state>"):
        reason = reason.partition(mark)[0]
    reason = " ".join(reason.split())
    return (
        reason if len(reason) <= MAX_REASON_CHARACTERS else reason[:MAX_REASON_CHARACTERS] + "..."
    )


@contextmanager
def _panics_as(error_type: type[ValueError | GuideError]) -> Generator[None]:
    """What the library panics of inside is an error of this type."""
    try:
        yield
    except BaseException as error:
        # A Rust library that panics raises what is no Exception, in a type that cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise error_type(_shortened(f"llguidance failed: {error}")) from error

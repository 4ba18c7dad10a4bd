"""Outputs of one choice, and what they should look like to a reader: decoded and searched anew.

The detokenizer is the real one. A token is any run of bytes, so characters and stop strings begin
and end inside tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from octavo.engine.request import FinishReason, RequestOutput
from octavo.models.detokenizer import IncrementalDetokenizer
from octavo.models.stop_strings import StopMatcher, StopStrings
from octavo.server.choice_output import ChoiceEnd, ChoiceOutput

NUM_TOP = 2
ENDS = [reason for reason in FinishReason if reason is not FinishReason.STOP]


class Vocabulary:
    """Token i is the i-th run of bytes."""

    special_token_ids: frozenset[int] = frozenset()
    drops_leading_space = False

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]


@dataclass(frozen=True)
class Case:
    """One output of the engine and what ends it.

    `reason` None: the server gives the request up after the last token.
    """

    tokens: list[bytes]
    stops: list[str]
    reason: FinishReason | None = FinishReason.LENGTH
    min_tokens: int = 0
    include_stop: bool = False

    def output(self, choice: int = 0) -> ChoiceOutput:
        matcher = None
        if self.stops:
            matcher = StopMatcher(StopStrings(self.stops), include_stop=self.include_stop)
        decoder = IncrementalDetokenizer(Vocabulary(self.tokens))
        return ChoiceOutput(choice, decoder, matcher, min_tokens=self.min_tokens, num_top=NUM_TOP)


@dataclass
class Seen:
    """What came out, joined; ids, log-probabilities and most likely ids each on their own."""

    token_ids: list[int]
    logprobs: list[float]
    top_token_ids: list[int]
    top_logprobs: list[float]
    text: str
    end: ChoiceEnd | None


def step(
    start: int, end: int, reason: FinishReason | None = None, *, choice: int = 0
) -> RequestOutput:
    """Tokens [start, end) in one step."""
    ids = range(start, end)
    return RequestOutput(
        request_id="a",
        choice=choice,
        token_ids=tuple(ids),
        logprobs=tuple(-float(i) for i in ids),
        top_token_ids=tuple(10 * i + rank for i in ids for rank in range(NUM_TOP)),
        top_logprobs=tuple(-float(10 * i + rank) for i in ids for rank in range(NUM_TOP)),
        finish_reason=reason,
    )


def expected(case: Case) -> Seen:
    """By decoding and searching all of the text again after each token."""

    def seen(num_tokens: int, text: str, end: ChoiceEnd | None) -> Seen:
        ids = list(range(num_tokens))
        tops = [10 * i + rank for i in ids for rank in range(NUM_TOP)]
        logprobs = [-float(i) for i in ids]
        return Seen(ids, logprobs, tops, [-float(i) for i in tops], text, end)

    total, before = len(case.tokens), ""
    for num_tokens in range(1, total + 2):
        decoder = IncrementalDetokenizer(Vocabulary(case.tokens))
        text = decoder.push(range(min(num_tokens, total)))
        text += decoder.flush() if num_tokens > total else ""
        for end in range(len(before) + 1, len(text) + 1):
            found = [stop for stop in case.stops if text[:end].endswith(stop)]
            if found and min(num_tokens, total) > case.min_tokens:
                stop = max(found, key=len)
                border = end if case.include_stop else end - len(stop)
                reason = ChoiceEnd(reason=FinishReason.STOP, stop=stop)
                return seen(min(num_tokens, total), text[:border], reason)
        before = text
    return seen(total, before, case.reason and ChoiceEnd(reason=case.reason))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    data = draw(st.text("aé€😀", max_size=24)).encode()
    if draw(st.booleans()):
        data += draw(
            st.sampled_from([b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xff\xe2", b"a\x80a"])
        )
    borders = draw(st.lists(st.integers(0, len(data)), max_size=24))
    cuts = [0, *sorted(borders), len(data)]
    return Case(
        # Some tokens are empty, as those are that are left out of the text.
        tokens=[data[start:end] for start, end in pairwise(cuts)],
        stops=draw(st.lists(st.text("aé€😀\ufffd", min_size=1, max_size=4), max_size=4)),
        reason=draw(st.sampled_from([*ENDS, None])),
        min_tokens=draw(st.sampled_from([0, 0, 1, 3, 8])),
        include_stop=draw(st.booleans()),
    )

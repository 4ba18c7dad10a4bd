"""ChoiceOutput against a plain model of it: whatever the tokens, the steps and the reads."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.engine.request import FinishReason, RequestOutput
from octavo.models.detokenizer import IncrementalDetokenizer
from octavo.server.call_interceptor import MAX_SEND_BYTES
from octavo.server.choice_output import ChoiceEnd, ChoiceOutput, Piece
from octavo.server.events import token_event
from octavo.server.logprobs import MAX_ENTRIES_PER_PIECE

from .choice_cases import ENDS, Case, Seen, Vocabulary, cases, expected, step


def seen(pieces: list[Piece]) -> Seen:
    """What came out, joined."""
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return Seen(
        [i for piece in pieces for i in piece.token_ids],
        [p for part in logprobs for p in part.values],
        [i for part in logprobs for i in part.top_token_ids],
        [p for part in logprobs for p in part.top_values],
        "".join(text for piece in pieces for text in piece.texts),
        pieces[-1].end if pieces else None,
    )


def run(case: Case, lengths: Sequence[int], reads: Sequence[bool] = ()) -> Seen:
    """Pushes steps of these lengths, the last one with what is left, and reads where it says so."""
    output, pieces = case.output(7), list[Piece]()
    borders = [0]
    for length in lengths:
        borders.append(min(borders[-1] + length, len(case.tokens)))
    borders.append(len(case.tokens))
    is_read = [*reads, *[False] * len(borders)]
    for number, (start, end) in enumerate(pairwise(borders)):
        is_last = number == len(borders) - 2
        output.push(step(start, end, case.reason if is_last else None))
        while is_read[number] and output.has_news:
            pieces.append(output.take())
    if case.reason is None and output.end is None:
        output.flush()
    while output.has_news:
        pieces.append(output.take())
    assert output.num_tokens == sum(len(piece.token_ids) for piece in pieces)
    assert all(piece.choice == 7 for piece in pieces)
    assert all(piece.end is None for piece in pieces[:-1])
    return seen(pieces)


LENGTHS = st.lists(st.integers(0, 6), max_size=24)
READS = st.lists(st.booleans(), max_size=26)


@given(cases(), LENGTHS, READS)
@example(Case([b"a", b"\xe2\x82"], ["a\ufffd"]), [1], [True])
@example(Case([b"ab", b"a", b"b"], ["aba", "ab"], min_tokens=1), [1, 1], [True, True])
def test_every_way_of_stepping_and_reading_gives_the_same(
    case: Case, lengths: list[int], reads: list[bool]
) -> None:
    """Cases 1.3, 1.5, 2.1, 2.3, 2.5 and 2.6: streamed, unstreamed, and the plain model agree.

    Breaks if a byte of a stop string leaves, if text that is held back is lost at an end of another
    kind, or if ids, log-probabilities and text are not cut at one place.
    """
    wanted = expected(case)
    assert run(case, []) == wanted
    assert run(case, lengths, reads) == wanted
    assert run(case, [1] * len(case.tokens), reads) == wanted


@given(cases(), LENGTHS)
def test_what_was_read_is_never_taken_back(case: Case, lengths: list[int]) -> None:
    """No part of a stop string leaves, at any time. Breaks if a beginning of one is sent early."""
    output, text, start = case.output(), "", 0
    wanted = expected(case).text
    for length in [*lengths, len(case.tokens)]:
        end = min(start + length, len(case.tokens))
        output.push(step(start, end))
        start = end
        while output.has_news:
            text += "".join(output.take().texts)
        assert wanted.startswith(text)


@pytest.mark.parametrize("reason", [*ENDS, None])
def test_held_back_text_is_flushed_at_every_other_end(reason: FinishReason | None) -> None:
    """Case 2.1. Breaks if an end forgets the matcher, or the detokenizer: é lacks a byte."""
    case = Case([b"Paris", b" is", b"\xc3"], ["Paris is not", "is\ufffd!"], reason)
    for lengths in ([3], [1, 2], [1, 1, 1]):
        assert run(case, lengths, [True] * 5).text == "Paris is\ufffd"


A, B, STOP, X = b"a", b"b", b"STOP", b"x"


@pytest.mark.parametrize("lengths", [[6], [1, 5], [2, 4], [3, 3], [1] * 6])
def test_an_accepted_run_is_cut_where_one_token_at_a_time_would_end(lengths: list[int]) -> None:
    """Case 2.6: [a, b, STOP, x, y, z] in one step, and each cap the engine may set."""
    case = Case([A, B, STOP, X, X, X], ["STOP"], FinishReason.LENGTH)
    assert run(case, lengths) == Seen(
        [0, 1, 2],
        [0, -1, -2],
        [0, 1, 10, 11, 20, 21],
        [0, -1, -10, -11, -20, -21],
        "ab",
        ChoiceEnd(reason=FinishReason.STOP, stop="STOP"),
    )


def test_a_cap_before_the_stop_string_counts() -> None:
    """Case 2.6 with a cap of 2. And at the very token of the stop string that string counts."""
    case = Case([A, B], ["STOP"], FinishReason.LENGTH)
    assert run(case, []).end == ChoiceEnd(reason=FinishReason.LENGTH)
    case = Case([A, B, STOP], ["STOP"], FinishReason.LENGTH)
    assert run(case, []).end == ChoiceEnd(reason=FinishReason.STOP, stop="STOP")


def test_a_stop_id_says_which_unless_its_text_is_a_stop_string() -> None:
    end = step(0, 1, FinishReason.STOP)._replace(stop_token_id=0)
    for stops, wanted in (
        (["x"], ChoiceEnd(reason=FinishReason.STOP, stop_token_id=0)),
        (["O"], ChoiceEnd(reason=FinishReason.STOP, stop="O")),
    ):
        output = Case([STOP], stops).output()
        output.push(end)
        assert output.take().end == wanted


def test_min_tokens_counts_the_token_that_completes() -> None:
    """Case 2.5. A newline as token 2 is text; one that begins before and ends after counts."""
    newline = Case([A, b"\n", B, b"\n", X], ["\n"], min_tokens=3)
    assert run(newline, []).text == "a\nb"
    assert run(newline, []).token_ids == [0, 1, 2, 3]
    across = Case([A, b"ST", b"OP", X], ["STOP"], min_tokens=2)
    assert run(across, []) == expected(across)
    assert run(across, []).text == "a"
    too_early = Case([A, b"ST", b"OP", X], ["STOP"], min_tokens=3)
    assert run(too_early, []).text == "aSTOPx"


def test_the_largest_event_is_below_the_message_limit() -> None:
    """Case 11.3: 20 most likely ids for each token, ids of five bytes, and long texts."""
    for num_top in (0, 20):
        output = ChoiceOutput(0, IncrementalDetokenizer(Vocabulary([b"x" * 200])), num_top=num_top)
        big = 2**31 - 1
        count = 2 * MAX_ENTRIES_PER_PIECE
        top_ids = (big,) * num_top * count
        logprobs = (-1.5,) * count
        output.push(
            RequestOutput(
                "a",
                (0,) * count,
                logprobs=logprobs,
                top_token_ids=top_ids,
                top_logprobs=(-1.5,) * len(top_ids),
            )
        )
        num_tokens = 0
        while output.has_news:
            piece = output.take()
            num_tokens += len(piece.token_ids)
            assert token_event(piece).ByteSize() < MAX_SEND_BYTES // 2
        assert num_tokens == count

"""StopMatcher against a search of the whole text, for every way of cutting the text up."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.models.stop_strings import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    StopMatcher,
    StopStrings,
)

# Few letters make overlaps and common beginnings likely.
LETTERS = "aé😀"
PART = st.text(LETTERS, max_size=4)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


def expected(
    parts: list[str], stops: list[str], *, num_ordinary: int = 0, include_stop: bool = False
) -> tuple[str, str | None]:
    """By trying each end in turn; matches count from part `num_ordinary` on."""
    text = "".join(parts)
    first_end = len("".join(parts[:num_ordinary])) + 1
    for end in range(first_end, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


def run(
    parts: list[str], stops: list[str], *, num_ordinary: int = 0, include_stop: bool = False
) -> tuple[list[str], str | None]:
    """What leaves with each part, and what was found."""
    matcher = StopMatcher(StopStrings(stops), include_stop=include_stop)
    left: list[str] = []
    for number, part in enumerate(parts):
        left.append(matcher.push(part, counts=number >= num_ordinary))
        if matcher.matched is not None:
            assert matcher.flush() == "", "the match begins in what was held back"
            return left, matcher.matched
    return [*left, matcher.flush()], None


@given(st.lists(PART, max_size=12), STOPS, st.integers(0, 6), st.booleans())
@example(["ab"], ["abc", "b"], 0, False)
@example(["ab", "a", "b"], ["aba", "ab"], 1, False)
@example(["aab"], ["ab", "b", "aab"], 0, False)
@example(["a", "aa", "b"], ["aab", "a"], 2, True)
def test_the_text_ends_where_a_search_of_all_of_it_says(
    parts: list[str], stops: list[str], num_ordinary: int, include_stop: bool
) -> None:
    """Case 2.3. Breaks if a link of the automaton is wrong: a match inside a longer beginning."""
    left, matched = run(parts, stops, num_ordinary=num_ordinary, include_stop=include_stop)
    wanted = expected(parts, stops, num_ordinary=num_ordinary, include_stop=include_stop)
    assert ("".join(left), matched) == wanted


@given(st.lists(PART, max_size=12), STOPS)
def test_only_what_a_stop_string_may_go_on_from_is_held_back(
    parts: list[str], stops: list[str]
) -> None:
    """Case 2.1. Breaks if more is held back, which is latency, or less, which is a leak."""
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    matcher = StopMatcher(StopStrings(stops))
    text = left = ""
    for part in parts:
        text += part
        left += matcher.push(part)
        if matcher.matched is not None:
            return
        held = text[len(left) :]
        assert held == max((b for b in beginnings if text.endswith(b)), key=len)
    assert left + matcher.flush() == text
    assert matcher.flush() == ""


@given(st.lists(PART, max_size=12), STOPS, st.integers(0, 6))
def test_ordinary_matches_leave_as_text_and_no_later_than_they_must(
    parts: list[str], stops: list[str], num_ordinary: int
) -> None:
    """Case 2.5. Breaks if a stop string that did not count is held back for ever."""
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    *left, held = run(parts[:num_ordinary], stops, num_ordinary=num_ordinary)[0]
    text = "".join(parts[:num_ordinary])
    assert "".join(left) + held == text
    assert held == max((b for b in beginnings if text.endswith(b)), key=len)


@pytest.mark.parametrize("stop", ["Par", "Pari", "aris."])
def test_stop_strings_that_begin_or_end_inside_a_token(stop: str) -> None:
    """Case 2.3's own words."""
    left, matched = run(["The capital is ", "Paris", ".", " It"], [stop])
    assert matched == stop
    assert "".join(left) == "The capital is Paris. It".split(stop)[0]


def test_a_stop_string_over_three_tokens_at_each_cut() -> None:
    """Case 2.3: no part of it leaves with any token, whatever the cut."""
    text = "one END two"
    for first in range(len(text)):
        for second in range(first, len(text)):
            left, matched = run([text[:first], text[first:second], text[second:]], ["END"])
            assert ("".join(left), matched) == ("one ", "END")


def test_long_beginnings_cost_no_more_than_their_length() -> None:
    """Breaks, by minutes, if each character starts a search over all that is held back."""
    stops = [f"{'a' * 255}{chr(98 + number)}" for number in range(MAX_STOP_STRINGS)]
    matcher = StopMatcher(StopStrings(stops))
    left = sum(len(matcher.push("a" * 100)) for _ in range(2000))
    assert left == 200_000 - 255
    assert len(matcher.flush()) == 255


@pytest.mark.parametrize(
    ("stops", "said"),
    [
        ([], "stop has 0 strings; it must have 1 to 16"),
        (["a"] * 17, "stop has 17 strings; it must have 1 to 16"),
        (["a", ""], r"stop\[1\] is 0 characters long; it must be 1 to 256"),
        (["a" * 257], r"stop\[0\] is 257 characters long; it must be 1 to 256"),
    ],
)
def test_what_is_out_of_bounds_is_named(stops: list[str], said: str) -> None:
    """Case 11.3."""
    with pytest.raises(ValueError, match=said):
        StopStrings(stops)


def test_the_bounds_themselves_are_taken() -> None:
    """In characters, not bytes."""
    widest = ["😀" * (MAX_STOP_CHARACTERS - 1) + chr(97 + i) for i in range(MAX_STOP_STRINGS)]
    left, matched = run(["x" + widest[3]], widest)
    assert (left, matched) == (["x"], widest[3])

"""Texts that end an output, found on its characters wherever tokens are cut. Pure; no JAX.

All texts are looked for at once by an Aho-Corasick automaton: a character costs the same on average
however many texts there are and however long they are. Its state is the longest end of the output
that begins one of them, so it also says exactly how much has to be held back.

Source: Aho and Corasick, Efficient String Matching, Communications of the ACM 18 (6), 1975.
"""

from collections import deque
from collections.abc import Sequence

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
"""Of each. With MAX_STOP_STRINGS they bound the automaton to some 4,000 states."""

_START = 0


class StopStrings:
    """The automaton for a set of texts; it does not change, so outputs may share it.

    A state is the longest end of the text so far that some stop string begins with, as a number.

    Attributes:
      texts: The stop strings.
      matched_lengths: By state, characters of the longest stop string that ends here; 0 for none.
      held_lengths: By state, characters at the end of the text that a stop string may still go on
        from: the longest proper beginning of one.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """The automaton of these texts.

        Raises:
          ValueError: There are none or too many, or one is empty or too long; says which.
        """
        if not 1 <= len(texts) <= MAX_STOP_STRINGS:
            raise ValueError(f"stop has {len(texts)} strings; it must have 1 to {MAX_STOP_STRINGS}")
        for index, text in enumerate(texts):
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise ValueError(
                    f"stop[{index}] is {len(text)} characters long; it must be 1 to "
                    f"{MAX_STOP_CHARACTERS}"
                )
        self.texts = tuple(texts)
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [_START]  # the state of the next shorter end that begins a stop string
        self.matched_lengths = [0]
        self.held_lengths = [0]
        for text in texts:
            self._add(text)
        self._link()

    def advance(self, state: int, character: str) -> int:
        """The state after one more character."""
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == _START:
                return _START
            state = self._shorter[state]

    def _add(self, text: str) -> None:
        """Adds the path of one text, without links to shorter ends."""
        state = _START
        for length, character in enumerate(text, 1):
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(_START)
                self.matched_lengths.append(0)
                self.held_lengths.append(length)
            state = following
        self.matched_lengths[state] = len(text)

    def _link(self) -> None:
        """Links each state to the next shorter one; shorter states are done before longer ones."""
        waiting = deque(self._next[_START].values())
        while waiting:
            state = waiting.popleft()
            shorter = self._shorter[state]
            # What ends in the text of the shorter state ends here too, and begins later.
            self.matched_lengths[state] = (
                self.matched_lengths[state] or self.matched_lengths[shorter]
            )
            if not self._next[state]:  # a whole stop string, which none goes on from
                self.held_lengths[state] = self.held_lengths[shorter]
            for character, following in self._next[state].items():
                self._shorter[following] = self.advance(shorter, character)
                waiting.append(following)


class StopMatcher:
    """Looks for stop strings in one output and holds back what may be the beginning of one.

    What leaves, joined, is the text up to the match, or all of it if there is none. The match that
    is complete first counts; of those that one character completes, the one that begins first.

    Attributes:
      matched: The stop string that was found; nothing is to be pushed afterwards.
    """

    def __init__(self, strings: StopStrings, *, include_stop: bool = False) -> None:
        """A matcher for a text that has not begun.

        Args:
          strings: What to look for.
          include_stop: The stop string leaves too, and only what follows it does not.
        """
        self.matched: str | None = None
        self._strings = strings
        self._include_stop = include_stop
        self._state = _START
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> str:
        """Takes the next part of the text and returns what may leave.

        Args:
          text: The next part.
          counts: Whether a stop string that ends in this part is a match. If not, it is ordinary
            text; one that begins in it and ends later may be a match all the same.
        """
        if not text:
            return ""
        strings, state = self._strings, self._state
        text = self._held + text
        for index in range(len(self._held), len(text)):
            state = strings.advance(state, text[index])
            if counts and (length := strings.matched_lengths[state]):
                self._held = ""
                end = index + 1
                self.matched = text[end - length : end]
                return text[: end if self._include_stop else end - length]
        self._state = state
        border = len(text) - strings.held_lengths[state]
        self._held = text[border:]
        return text[:border]

    def flush(self) -> str:
        """What was held back, when the output ended otherwise."""
        held, self._held = self._held, ""
        return held

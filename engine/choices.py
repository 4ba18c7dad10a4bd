"""Choices: the live outputs of each request, by the id that its client knows. No JAX.

Choices beyond the first share the pages of the prompt, so they are held back, in no queue, until
the first one has a token. If that never comes, they end with it.
"""

from collections.abc import Iterator

from .schedule import RequestState


class Choices:
    """What is live. An engine without any has no request."""

    def __init__(self) -> None:
        """Starts empty."""
        self._live: dict[str, dict[int, RequestState]] = {}

    def __contains__(self, state: RequestState) -> bool:
        """Whether it has not ended."""
        return self._live.get(state.reply_to, {}).get(state.choice) is state

    def __iter__(self) -> Iterator[RequestState]:
        """All of them, the oldest first, and a leader before its forks."""
        for choices in self._live.values():
            yield from choices.values()

    def add(self, leader: RequestState) -> None:
        """A request came, with its forks."""
        self._live[leader.reply_to] = {each.choice: each for each in (leader, *leader.forks)}

    def find(self, request_id: str, choice: int | None = None) -> list[RequestState]:
        """Those of a request that are live, or the one that is meant."""
        choices = self._live.get(request_id, {}).values()
        return [state for state in choices if choice in (None, state.choice)]

    def remove(self, state: RequestState) -> None:
        """It has ended."""
        choices = self._live[state.reply_to]
        del choices[state.choice]
        if not choices:
            del self._live[state.reply_to]

    def held_back_by(self, leader: RequestState) -> list[RequestState]:
        """Live forks that wait for its first token."""
        return [fork for fork in leader.forks if is_held_back(fork) and fork in self]


def is_held_back(state: RequestState) -> bool:
    """Whether a choice is in no queue yet: the prompt that it shares was not computed."""
    return state.ordinal < 0

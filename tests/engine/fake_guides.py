"""Guides that are numbers, and some whose masks wait until they are let go."""

import threading
from collections.abc import Sequence
from typing import override

import numpy as np

from octavo.engine.guided_masks import GuideError
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.engine.token_masks import Mask, num_words, with_ids

from .fake_model import EOS, VOCAB_SIZE, hash_of


def guide(number: int) -> Guide:
    """What a request asks for to be guided by that number."""
    return Guide(kind=GuideKind.REGEX, text=str(number))


class FakeGuides:
    """A guide is a number; after so many ids it lets only some come, EOS among them at times."""

    def start(self, guide: Guide) -> "FakeGuideState":
        return FakeGuideState(int(guide.text))


class FakeGuideState:
    def __init__(self, number: int) -> None:
        self.number = number
        self.taken: list[int] = []

    def mask(self) -> Mask:
        return mask_of(guided_ids(self.number, self.taken))

    def take(self, token_id: int) -> None:
        if token_id not in guided_ids(self.number, self.taken):
            raise GuideError(f"id {token_id} breaks guide {self.number}")
        self.taken.append(token_id)


def guided_ids(number: int, taken: Sequence[int]) -> list[int]:
    """Which ids a fake guide lets come next."""
    ids = [each for each in range(VOCAB_SIZE) if hash_of(number, *taken, each) % 4 == 0]
    return ids or [EOS]


def mask_of(token_ids: Sequence[int]) -> Mask:
    return with_ids(np.zeros(num_words(VOCAB_SIZE), np.int32), token_ids)


class HeldGuides(FakeGuides):
    """An output waits for the mask after `num_free` tokens until `may_go_on` is set, and the others
    with it: masks are worked out one after the other.
    """

    def __init__(self, num_free: int = 0) -> None:
        self.num_free = num_free
        self.may_go_on = threading.Event()

    @override
    def start(self, guide: Guide) -> FakeGuideState:
        guides = self

        class Held(FakeGuideState):
            @override
            def mask(self) -> Mask:
                assert len(self.taken) < guides.num_free or guides.may_go_on.wait(30)
                return super().mask()

        return Held(int(guide.text))

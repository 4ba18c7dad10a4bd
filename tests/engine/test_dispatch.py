"""Transfers between device and host: in order, in few calls, none of which writes a page twice."""

import random
from collections.abc import Sequence
from typing import override

import pytest

from octavo.engine.dispatch import Dispatcher
from octavo.engine.schedule import PageEntry, Schedule, Transfer, TransferKind

from .fake_model import VOCAB_SIZE
from .fakes import FakeExecutor, limits_for, small_config


class _Watched(FakeExecutor):
    """Notes each call that moves pages, and moves none."""

    def __init__(self) -> None:
        super().__init__(small_config(), limits_for(small_config(), num_pages=9))
        self.calls: list[list[Transfer]] = []

    @override
    def export_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.calls.append([Transfer(TransferKind.EXPORT, page, handle) for page, handle in pairs])

    @override
    def import_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.calls.append([Transfer(TransferKind.IMPORT, page, handle) for handle, page in pairs])

    @override
    def drop_pages(self, handles: Sequence[int]) -> None:
        self.calls.append([Transfer(TransferKind.DROP, 0, handle) for handle in handles])


@pytest.mark.parametrize("seed", range(20))
def test_transfers_go_in_order_and_in_no_more_calls_than_needed(seed: int) -> None:
    """Two copies into one page are two calls: the later must win. Out of one they may share one."""
    rng = random.Random(seed)
    transfers: list[Transfer] = []
    for handle in range(rng.randint(0, 40)):
        kind = rng.choice([*TransferKind, TransferKind.IMPORT])
        page = 0 if kind is TransferKind.DROP else rng.randint(1, 8)
        transfers.append(Transfer(kind, page, handle))
    executor = _Watched()
    step = Schedule(
        decodes=(),
        chunks=(),
        page_entries=(PageEntry(0, 0, 1),),
        transfers=tuple(transfers),
    )
    Dispatcher(executor.config, VOCAB_SIZE).dispatch(executor, step, 0.0)
    assert [each for call in executor.calls for each in call] == transfers
    for call in executor.calls:
        assert _is_one_call(call), "an executor refuses this"
    for call, after in zip(executor.calls, executor.calls[1:], strict=False):
        assert not _is_one_call([*call, after[0]]), "one call more than needed"


def _is_one_call(transfers: Sequence[Transfer]) -> bool:
    kinds = {each.kind for each in transfers}
    targets = [each.page for each in transfers if each.kind is TransferKind.IMPORT]
    return len(kinds) == 1 and len(set(targets)) == len(targets)

"""Dispatch: from a schedule to what the device runs, and from that to what it brought. No JAX."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..configs.engine_config import EngineConfig
from . import packing
from .packing import StepResult
from .schedule import Schedule, Transfer, TransferKind
from .step_shapes import StepKey, StepShapes


@runtime_checkable
class Executor(Protocol):
    """Runs steps on the device, in the order in which they are dispatched."""

    def dispatch(
        self, key: StepKey, packed: np.ndarray, mask_rows: np.ndarray | None = None
    ) -> Any:
        """Starts a step and returns at once; the arrays belong to the step from here on."""

    def fetch(self, result: Any) -> np.ndarray:
        """Waits for what `dispatch` returned and brings it to the host."""

    def export_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Starts to copy each (page, handle) to host memory, as steps so far leave it."""

    def import_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Starts to copy each (handle, page) back, for steps dispatched from here on.

        No page is named twice.
        """

    def drop_pages(self, handles: Sequence[int]) -> None:
        """Forgets copies in host memory."""


@dataclass(frozen=True, kw_only=True)
class DispatchedStep:
    """A step that was not read yet.

    Attributes:
      key: Its executable.
      schedule: What it does.
      result: What the executor returned.
      at_s: When it was dispatched.
    """

    key: StepKey
    schedule: Schedule
    result: Any
    at_s: float


class Dispatcher:
    """Knows the executable and the upload of each schedule."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        """The same sizes that the executables were compiled for."""
        self._shapes = StepShapes.from_config(config)
        layouts = packing.upload_layouts(config, vocab_size)
        self._layouts = {layout.key: layout for layout in layouts}

    def dispatch(self, executor: Executor, schedule: Schedule, now_s: float) -> DispatchedStep:
        """Starts a step, after the copies that must come before it."""
        if schedule.transfers:
            _start_transfers(executor, schedule.transfers)
        num_chunk_tokens = sum(chunk.length for chunk in schedule.chunks)
        key = self._shapes.key_for(len(schedule.decodes), num_chunk_tokens)
        layout = self._layouts[key]
        result = executor.dispatch(
            key, packing.pack(schedule, layout), packing.pack_masks(schedule, layout)
        )
        return DispatchedStep(key=key, schedule=schedule, result=result, at_s=now_s)


def fetch(executor: Executor, step: DispatchedStep) -> StepResult:
    """Waits for a step."""
    return packing.unpack(step.key, executor.fetch(step.result))


def _start_transfers(executor: Executor, transfers: Sequence[Transfer]) -> None:
    """Starts copies between device and host memory, as many together as one call takes."""
    for run in _runs(transfers):
        match run[0].kind:
            case TransferKind.EXPORT:
                executor.export_pages([(each.page, each.handle) for each in run])
            case TransferKind.IMPORT:
                executor.import_pages([(each.handle, each.page) for each in run])
            case TransferKind.DROP:
                executor.drop_pages([each.handle for each in run])


def _runs(transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    """Neighbours of one kind. Of those that write, no two write one page: the later is to win.

    It happens where somebody ends that came back and was part of no step: its pages go to the next
    one that comes back. A page may be read twice: two who share it are preempted together.
    """
    run: list[Transfer] = []
    written = set[int]()
    for each in transfers:
        if run and (each.kind is not run[0].kind or each.page in written):
            yield run
            run = []
            written.clear()
        run.append(each)
        if each.kind is TransferKind.IMPORT:
            written.add(each.page)
    if run:
        yield run

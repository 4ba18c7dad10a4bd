"""The TPU backend in Pallas' interpreter, as a subject of the attention cases.

Two accesses to a place that nothing orders are an error there, memory that nobody wrote holds NaN,
and a copy moves nothing until somebody waits for it.
"""

import faulthandler
from collections.abc import Iterator
from functools import partial

import pytest

from octavo.pallas_kernels.tpu_backend import TpuBackend

from . import tpu_pages
from .attention_steps import Subject

HANG_S = 900  # a wait for what never comes does not return, not even to a signal handler


def tpu_subject() -> Subject:
    """One that equals no other: steps that were compiled for it are of no other test."""
    return Subject(TpuBackend("races"), partial(tpu_pages.pack), tpu_pages.unpack)


TPU = tpu_subject()


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """Ends the tests, all of them, where one hangs, and says where it was."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()

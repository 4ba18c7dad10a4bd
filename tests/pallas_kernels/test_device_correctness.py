"""What judges the kernels on a real device: a right result passes, and planted faults do not."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.backend import AttentionBackend
from octavo.pallas_kernels.gpu_backend import GpuBackend
from octavo.pallas_kernels.gpu_budget import GpuChip
from octavo.pallas_kernels.reference_backend import ReferenceBackend
from octavo.pallas_kernels.tpu_backend import TpuBackend

from .attention_cases import Case, pages_after
from .attention_checks import cases
from .attention_steps import REFERENCE, compiled_step, run
from .device_correctness import (
    DRY_RUN,
    case_faults,
    case_in_float32,
    neighbour_faults,
    page_faults,
    subject_of,
)


@pytest.fixture(scope="module")
def case() -> Case:
    return cases(DRY_RUN[1])["one token, rows long ones last"]


@pytest.fixture(scope="module")
def right(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return run(REFERENCE, compiled_step(REFERENCE, case.shape), case)


def test_a_right_result_has_no_fault(
    case: Case, right: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    in_float32 = case_in_float32(case)
    wanted, *_ = run(REFERENCE, compiled_step(REFERENCE, in_float32.shape), in_float32)
    difference = case_faults(case, right, wanted)
    assert difference.faults == []
    assert 0 < difference.worst_error < 3e-2


def _nan(attended: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray) -> None:
    attended[1, 0, 0] = np.nan


def _wrong_value(attended: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray) -> None:
    attended[2, 2, 79] += 0.1


def _padding(attended: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray) -> None:
    attended[-1, 1, 1] = 1e-3


def _page_0(attended: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray) -> None:
    k_pages[0, 0, 0, 0] = -0.0


def _free_place(attended: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray) -> None:
    v_pages[-1, -1, 0, 0] = 0


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_nan, "NaN or infinity in 1 tokens, the first 1"),
        (_wrong_value, "token 2, head 2"),
        (_padding, "padding attends to something"),
        (_page_0, "1 places of key pages differ, the first page 0, 0"),
        (_free_place, "1 places of value pages differ"),
    ],
)
def test_a_planted_wrong_result_is_a_fault(
    case: Case, right: tuple[np.ndarray, np.ndarray, np.ndarray], plant: Any, words: str
) -> None:
    wanted = right[0].copy()
    found = right[0].copy(), right[1].copy(), right[2].copy()
    plant(*found)
    (fault,) = case_faults(case, found, wanted).faults
    assert words in fault


def test_a_row_that_knows_its_neighbours_is_a_fault() -> None:
    backend = _Neighbourly()
    subject = replace(REFERENCE, backend=backend)
    faults = neighbour_faults(subject, DRY_RUN[0])
    assert len(faults) == 1
    assert faults[0].startswith("check_rows_are_alone")


class _Neighbourly(ReferenceBackend):
    """Adds to each row a little of the longest one."""

    def decode_attention(self, *arguments: Any) -> jax.Array:
        attended = super().decode_attention(*arguments)
        return attended + attended.sum() * 1e-6


@pytest.mark.parametrize(
    "backend",
    [GpuBackend(GpuChip(compute_capability=90, num_sms=132)), TpuBackend("yes")],
    ids=lambda backend: backend.name,
)
def test_pages_are_read_as_the_backend_writes_them(backend: AttentionBackend, case: Case) -> None:
    """On a device this is what pages are judged by."""
    subject = subject_of(backend)
    layer = subject.pack(case.k_pages, case.v_pages)
    shape = case.shape
    places = [
        shape.num_pages * shape.page_size + i if at is None else at[0] * shape.page_size + at[1]
        for i, at in enumerate(case.places)
    ]
    k, v, slot_mapping = map(jnp.asarray, (case.k, case.v, np.asarray(places, np.int32)))
    layer = backend.write_kv(layer, k, v, slot_mapping)
    pages = subject.unpack(layer, shape.kv_heads, shape.head_dim)
    assert page_faults(pages, pages_after(case)) == []

"""The whole table on a real device, compiled for real. Part "correctness" of bench/device_check.py.

The platform's own kernels run every case in bfloat16 and are held to the reference backend on the
same device, which sees the same keys and values in float32 pages, and both to the NumPy oracle.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from octavo.pallas_kernels.backend import AttentionBackend
from octavo.pallas_kernels.choice import choose
from octavo.pallas_kernels.gpu_backend import GpuBackend
from octavo.pallas_kernels.reference_backend import ReferenceBackend
from octavo.pallas_kernels.tpu_backend import TpuBackend

from . import attention_checks, gpu_pages, tpu_pages
from .attention_cases import Case, Shape, bits, pages_after
from .attention_checks import TOLERANCE, cases, compiled
from .attention_steps import REFERENCE, Subject, run
from .attention_table import table

DRY_RUN = (
    Shape(3, 0, page_size=16, kv_heads=2, group=2, head_dim=64, dtype="bfloat16", max_len=140),
    Shape(2, 16, page_size=16, kv_heads=1, group=3, head_dim=80, dtype="bfloat16", max_len=140),
)
_MAX_FAULTS = 5  # of one shape; more say no more
_MAX_FAULT = 300  # characters

Pages = tuple[np.ndarray, np.ndarray]


def tasks(is_dry_run: bool) -> Mapping[str, Callable[[], dict[str, Any]]]:
    """One task for each shape of the table."""
    shapes = DRY_RUN if is_dry_run else table("bfloat16")
    return {str(shape): partial(check, shape) for shape in shapes}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How what a backend gave differs from what is right.

    Attributes:
      worst_error: Of all finite numbers, relative to what is right where that exceeds 1.
      faults: What is wrong, in words; empty: nothing.
    """

    worst_error: float
    faults: list[str]


def differences(attended: np.ndarray, wanted: np.ndarray, tolerance: float) -> Difference:
    """Compares what tokens attended to, [tokens, q_heads, head_dim]."""
    faults: list[str] = []
    is_finite = np.isfinite(attended)
    if not is_finite.all():
        tokens = np.flatnonzero(~is_finite.all((1, 2))).tolist()
        faults.append(f"NaN or infinity in {len(tokens)} tokens, the first {tokens[0]}")
    error = np.abs(attended - wanted) / np.maximum(1.0, np.abs(wanted))
    error = np.where(is_finite, error, 0.0)
    worst = float(error.max(initial=0.0))
    if worst > tolerance:
        token, head, _ = (int(i) for i in np.unravel_index(error.argmax(), error.shape))
        faults.append(f"error {worst:.3g} at token {token}, head {head}; at most {tolerance:g}")
    return Difference(worst_error=worst, faults=faults)


def page_faults(pages: Pages, wanted: Pages) -> list[str]:
    """Compares stored pages bit by bit: page 0, places that nobody wrote and padding included."""
    faults: list[str] = []
    for name, one, other in zip(("key", "value"), pages, wanted, strict=True):
        wrong = (bits(one) != bits(other)).any((2, 3))
        if wrong.any():
            page, offset = (int(i) for i in np.argwhere(wrong)[0])
            faults.append(
                f"{wrong.sum()} places of {name} pages differ, the first page {page}, {offset}"
            )
    return faults


def case_faults(
    case: Case, found: tuple[np.ndarray, np.ndarray, np.ndarray], wanted: np.ndarray
) -> Difference:
    """What is wrong with a step's results.

    Args:
      case: The step.
      found: What the backend attended to, and its key and value pages after the step.
      wanted: What the reference attended to.
    """
    attended, k_pages, v_pages = found
    difference = differences(attended, wanted, TOLERANCE[case.shape.dtype])
    faults = [*difference.faults, *page_faults((k_pages, v_pages), pages_after(case))]
    padding = [place is None for place in case.places]
    if attended[padding].any():
        faults.append("padding attends to something")
    return replace(difference, faults=faults)


def check(shape: Shape) -> dict[str, Any]:
    """Runs every case of a shape, and what must not depend on neighbours, bit by bit."""
    choice = choose("auto", jax.devices()[0], shape.attention_shape())
    subject = subject_of(choice.backend)
    in_float32 = replace(shape, dtype="float32")
    faults = [f"the kernels do not run: {choice.reason}"] if choice.reason else []
    errors: list[float] = []
    oracle_errors: list[float] = []
    reference_errors: list[float] = []
    for name, case in cases(shape).items():
        found = run(subject, compiled(subject, shape), case)
        wanted, *_ = run(REFERENCE, compiled(REFERENCE, in_float32), case_in_float32(case))
        difference = case_faults(case, found, wanted)
        faults += [f"{name}: {fault}" for fault in difference.faults]
        errors.append(difference.worst_error)
        beside_oracle = differences(found[0], case.expected, TOLERANCE[shape.dtype])
        oracle_errors.append(beside_oracle.worst_error)
        # It is the yardstick, and the fallback, and has to be right itself.
        own = differences(wanted, case.expected, TOLERANCE["float32"])
        reference_errors.append(own.worst_error)
        faults += [f"{name}, the reference itself: {fault}" for fault in own.faults]
    faults += neighbour_faults(subject, shape)
    return {
        "attention": subject.backend.name,
        "cases": len(errors),
        "worst_error": max(errors),
        "worst_error_to_oracle": max(oracle_errors),
        "worst_error_of_reference": max(reference_errors),
        "failures": [fault[:_MAX_FAULT] for fault in faults[:_MAX_FAULTS]],
        "num_failures": len(faults),
    }


def neighbour_faults(subject: Subject, shape: Shape) -> list[str]:
    """Rows, and segments where there are any, keep every bit whatever is beside them."""
    checks = [attention_checks.check_rows_are_alone]
    if shape.chunk:
        checks.append(attention_checks.check_segments_are_alone)
        checks.append(attention_checks.check_nan_poisons_nobody_else)
    faults: list[str] = []
    for check_one in checks:
        try:
            check_one(subject, shape)
        except AssertionError as error:
            faults.append(f"{check_one.__name__}: {' '.join(str(error).split())}")
    return faults


def subject_of(backend: AttentionBackend) -> Subject:
    """A backend, with what reads and writes its pages.

    Raises:
      ValueError: Nothing here knows its pages.
    """
    match backend:
        case ReferenceBackend():
            return REFERENCE
        case GpuBackend():
            return Subject(backend, gpu_pages.pack, gpu_pages.unpack)
        case TpuBackend():
            return Subject(backend, tpu_pages.pack, tpu_pages.unpack)
        case _:
            raise ValueError(f"pages of the backend {backend.name!r} are not known here")


def case_in_float32(case: Case) -> Case:
    """The same keys and values in pages of float32."""
    return replace(
        case,
        shape=replace(case.shape, dtype="float32"),
        k_pages=case.k_pages.astype(np.float32),
        v_pages=case.v_pages.astype(np.float32),
    )

"""Records that travel between processes and stay on disk.

Breaks when an answer is not the same after it was written.
"""

import dataclasses

import pytest

from octavo.engine.plan_records import plan_from_json, plan_to_json

from .plan_examples import PLAN


def test_an_answer_comes_back_as_it_was() -> None:
    assert plan_from_json(plan_to_json(PLAN)) == PLAN


def test_code_is_that_of_all_steps_and_of_what_moves_pages() -> None:
    """Not every step was compiled, and each is counted as the largest; transfers are there once."""
    (step,) = PLAN.executables
    transfers = [
        dataclasses.replace(step, kind=kind, program_bytes=size)
        for kind, size in (("export", 100), ("import", 20))
    ]
    plan = dataclasses.replace(PLAN, executables=(step, *transfers))
    assert plan.program_bytes == (PLAN.num_executables - 2) * step.program_bytes + 120


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"executables": [{}], "kernels": []}'])
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no plan: "):
        plan_from_json(text)

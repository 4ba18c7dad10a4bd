"""Records that travel between processes and stay on disk.

Breaks when an answer is not the same after it was written.
"""

import pytest

from octavo.engine.plan_records import plan_from_json, plan_to_json

from .plan_examples import PLAN


def test_an_answer_comes_back_as_it_was() -> None:
    assert plan_from_json(plan_to_json(PLAN)) == PLAN


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"steps": [{}], "kernels": []}'])
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no plan: "):
        plan_from_json(text)

"""The whole table as tests, one for each case: an interpreter takes minutes for some of them."""

import pytest

from .attention_checks import case_names
from .attention_table import table


def whole_table(dtype: str) -> pytest.MarkDecorator:
    """For a test of a `shape` and of a case's `name`."""
    every = [(shape, name) for shape in table(dtype) for name in case_names(shape)]
    ids = [f"{shape}-{name}" for shape, name in every]
    return pytest.mark.parametrize(("shape", "name"), every, ids=ids)

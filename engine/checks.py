"""Checks of single values, in the positive form, so that NaN passes none. No JAX."""

from collections.abc import Sequence

from .refusals import InvalidRequest


def require(field: str, value: object, is_met: bool, bound: str) -> None:
    """Raises InvalidRequest unless the bound is met."""
    if not is_met:
        raise InvalidRequest(field, value, bound)


def is_int(value: object, low: int, high: int) -> bool:
    """Neither bool, which is an int to Python, nor float."""
    return type(value) is int and low <= value <= high


def is_number(value: object, low: float, high: float) -> bool:
    """The bounds are finite, so NaN and infinities do not pass."""
    return isinstance(value, int | float) and type(value) is not bool and low <= value <= high


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest for the first id that is not in the vocabulary."""
    # Prompts are long: one pass of each builtin, and the slow loop only to name the culprit.
    if not token_ids or (
        set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size
    ):
        return
    for index, token_id in enumerate(token_ids):
        if not is_int(token_id, 0, vocab_size - 1):
            raise InvalidRequest(field, token_id, f"a token id in [0, {vocab_size})", index)

"""Numbers of a JSON schema, rewritten so that llguidance reads them as they are. No JAX.

llguidance reads numbers into float64, not always to the nearest: those of more than 15 digits, or
22 decimals, may become their neighbours. An exclusive bound that is whole lets itself through where
the other bound is less than 1 away. So bounds become inclusive ones of so many digits, just inside.
"""

from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, Decimal
from math import lcm
from typing import Any

BOUND_KEYWORDS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"})
COUNT_KEYWORDS = frozenset(
    {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
)

_MAX_EXACT = 2**53
_NUM_DIGITS = 15
_NUM_DECIMALS = 22
_MAX_MULTIPLE = 2**32  # llguidance reckons with such integers and does not notice overflow


def check_bound(value: object, place: str) -> None:
    """Raises ValueError if it is no number, or too large to be followed."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{place} must be a number")
    if not abs(value) <= _MAX_EXACT:
        raise ValueError(f"{place} has a number beyond 2**53, which is not supported")


def check_exact(value: object, place: str) -> None:
    """Raises ValueError if it is no number, or llguidance may read another."""
    check_bound(value, place)
    if isinstance(value, float):
        _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
        assert isinstance(exponent, int), "it is finite"
        if len(digits) > _NUM_DIGITS or exponent < -_NUM_DECIMALS:
            raise ValueError(
                f"{place} has a number of more than {_NUM_DIGITS} digits or {_NUM_DECIMALS} "
                "decimals, which is not supported"
            )


def check_multiple(value: object, place: str) -> None:
    """Raises ValueError if it is no value of multipleOf, or llguidance may read another."""
    check_exact(value, place)
    assert isinstance(value, int | float)
    if value <= 0:
        raise ValueError(f"{place} must be above 0")


def check_count(value: object, place: str) -> None:
    """Raises ValueError if it is no whole number from 0 on; it may be a float, as 1.0."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or value < 0:
        raise ValueError(f"{place} must be a whole number from 0 on")


def check_multiples(values: Iterable[int | float]) -> None:
    """Checks that all the values of multipleOf can hold at once.

    Raises:
      ValueError: Their common multiple is too large.
    """
    exact = [Decimal(repr(value)) for value in values]
    decimals = max((-int(each.normalize().as_tuple().exponent) for each in exact), default=0)
    whole = [int(each.scaleb(max(decimals, 0))) for each in exact]
    common, largest = 1, max(whole, default=0)
    for each in whole if len(set(whole)) > 1 else ():
        common = lcm(common, each)
        if common * largest >= _MAX_MULTIPLE:  # before it has grown
            raise ValueError(
                "the schema combines subschemas whose multipleOf have too large a common multiple"
            )


def rewritten_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds of a subschema as llguidance gets them: inclusive, none wider than it was.

    Raises:
      ValueError: Nothing that it can read is left above or below.
    """
    bounds: dict[str, Any] = {}
    least = [
        _at_least(Decimal(repr(schema[keyword])), is_exclusive=keyword == "exclusiveMinimum")
        for keyword in ("minimum", "exclusiveMinimum")
        if keyword in schema
    ]
    most = [
        -_at_least(-Decimal(repr(schema[keyword])), is_exclusive=keyword == "exclusiveMaximum")
        for keyword in ("maximum", "exclusiveMaximum")
        if keyword in schema
    ]
    if least:
        bounds["minimum"] = _as_json(max(least))
    if most:
        bounds["maximum"] = _as_json(min(most))
    return bounds


def _at_least(bound: Decimal, *, is_exclusive: bool) -> Decimal:
    """The least number of so many digits that is not below the bound, or above it."""
    num_decimals = _NUM_DECIMALS
    if bound:
        num_decimals = max(0, min(_NUM_DECIMALS, _NUM_DIGITS - 1 - bound.adjusted()))
    unit = Decimal(1).scaleb(-num_decimals)
    rounded = bound.quantize(unit, rounding=ROUND_CEILING)
    return rounded + unit if is_exclusive and rounded == bound else rounded


def _as_json(number: Decimal) -> int | float:
    if abs(number) > _MAX_EXACT:
        raise ValueError("a bound has no neighbour within 2**53, which is not supported")
    return int(number) if number == int(number) else float(number)

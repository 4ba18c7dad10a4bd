"""Numbers that come through are right whoever reads them, exactly or into float64: fails where a
bound lets itself or its neighbour through, or where llguidance takes a number for another."""

import itertools
import json
import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from .byte_guides import schema_lets_through

BOUNDS = [-1.5, -1, -0.5, 0, 0.05, 0.5, 1, 1.5]
DECIMALS = ["0", "5", "00", "05", "25", "50", "49", "51", "04", "06", "99", "001", "501"]
DECIMALS += ["0000000000000001", "00000000000000000000000001", "99999999999999999999"]
TEXTS = ["0", "1", "2", "3", "10", "-0", "-1", "-2", "-10", "1e0", "5e-1", "0e5", "1E1", "-1e-1"]
TEXTS += [f"{whole}.{each}" for whole in (0, 1, 2, "-0", "-1", "-2") for each in DECIMALS]
LEAST = ("minimum", "exclusiveMinimum")
MOST = ("maximum", "exclusiveMaximum")


def in_float64(number: str) -> Fraction:
    return Fraction(float(number))


def validates(
    schema: dict[str, Any], text: str, read: Callable[[str], Fraction] = Fraction
) -> bool:
    """As draft 2020-12 has it, for a reader that takes numbers as they are, or into float64."""
    number = read(text)

    def bound(keyword: str) -> Fraction:
        return read(repr(schema[keyword]))

    return not (
        ("minimum" in schema and number < bound("minimum"))
        or ("exclusiveMinimum" in schema and number <= bound("exclusiveMinimum"))
        or ("maximum" in schema and number > bound("maximum"))
        or ("exclusiveMaximum" in schema and number >= bound("exclusiveMaximum"))
        or ("multipleOf" in schema and (number / bound("multipleOf")).denominator != 1)
        or (schema.get("type") == "integer" and number.denominator != 1)
    )


def check(schema: dict[str, Any], texts: list[str], merged: dict[str, Any] | None = None) -> int:
    """How many come through, all of which must validate; those that are refused are none."""
    try:
        lets_number_through = schema_lets_through(merged or schema)
    except ValueError:
        return 0
    passing = [text for text in texts if lets_number_through(text)]
    for text in passing:
        assert validates(schema, text), (schema, text)
        if "multipleOf" not in schema:
            assert validates(schema, text, in_float64), (schema, text)
    return len(passing)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("number_type", ["number", "integer"])
@pytest.mark.parametrize(("least", "most"), list(itertools.product(LEAST, MOST)))
def test_bounds_on_both_sides(number_type: str, least: str, most: str):
    """Whole and not, on both sides of 0, wide and narrow; and numbers within them do come."""
    num_open = 0
    for low, high in itertools.combinations_with_replacement(BOUNDS, 2):
        num_passing = check({"type": number_type, least: low, most: high}, TEXTS)
        num_open += num_passing > 0
    assert num_open >= (25 if number_type == "number" else 15)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("number_type", ["number", "integer"])
@pytest.mark.parametrize("keyword", [*LEAST, *MOST])
def test_bounds_on_one_side(number_type: str, keyword: str):
    for bound in [*BOUNDS, 9.75, 100, -100]:
        assert check({"type": number_type, keyword: bound}, [*TEXTS, "1000", "-1000"])


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("multiple", [0.5, 0.05, 1.5])
def test_multiples_beside_bounds(multiple: float):
    num_open = 0
    for low, high in itertools.combinations([-1, -0.5, 0, 0.05, 0.5, 1], 2):
        for least, most in itertools.product(LEAST, MOST):
            bounds = {"type": "number", least: low, most: high, "multipleOf": multiple}
            num_open += check(bounds, TEXTS) > 0
    assert num_open > 10


@pytest.mark.usefixtures("types_unchecked")
def test_bounds_of_several_subschemas_hold_together():
    for low, high in itertools.combinations([-1, -0.5, 0, 0.5, 1], 2):
        bounds: dict[str, Any] = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        schema = {"type": "number"} | bounds
        apart = [{key: value} for key, value in bounds.items()]
        assert check(schema, TEXTS, {"type": "number", "allOf": apart})
        assert check(schema, TEXTS, {"anyOf": [{"type": "number"}], "allOf": apart})
        ref = {"$ref": "#/$defs/a", "exclusiveMinimum": low, "type": "number"}
        assert check(schema, TEXTS, ref | {"$defs": {"a": apart[1]}})
        check(schema | {"minimum": 0}, TEXTS)


@pytest.mark.usefixtures("types_unchecked")
def test_bounds_of_many_digits():
    """Whose neighbours llguidance may read in their place."""
    rng = random.Random(5)
    for _ in range(40):
        bound = rng.choice([-1, 1]) * rng.random() * 10.0 ** rng.randint(-12, 12)
        exact = Decimal(repr(bound))
        step = Decimal(1).scaleb(exact.adjusted() - 16)
        texts = [f"{exact + step * steps:f}" for steps in (*range(-6, 7), -50, 50, 1000)]
        for keyword in (*LEAST, *MOST):
            check({"type": "number", keyword: bound}, texts)


@pytest.mark.usefixtures("types_unchecked")
def test_whole_bounds_up_to_the_largest():
    """None that is right is lost to integers."""
    for bound in (2**53 - 2, 10**15, 10**14 + 1, 123_456_789_012):
        texts = [str(bound + step) for step in range(-2, 3)]
        for keyword in (*LEAST, *MOST):
            num_right = sum(
                validates({keyword: bound}, text) and int(text) <= 2**53 for text in texts
            )
            assert check({"type": "integer", keyword: bound}, texts) >= num_right


@pytest.mark.usefixtures("types_unchecked")
def test_what_a_number_must_be_is_that_number():
    rng, num_held = random.Random(7), 0
    for _ in range(150):
        value = round(rng.uniform(-1, 1) * 10 ** rng.randint(-6, 9), rng.randint(0, 12)) or 1
        for number in (value, rng.random()):
            try:
                lets_number_through = schema_lets_through({"enum": [number, "a"]})
            except ValueError:
                continue
            num_held += 1
            if number == int(number):
                assert lets_number_through(str(int(number)))
            else:
                assert lets_number_through(f"{Decimal(repr(number)):f}"), number
    assert num_held > 120


@pytest.mark.usefixtures("types_unchecked")
def test_multiples_of_several_subschemas_hold_together():
    """llguidance reckons with their common multiple, in 32 bits."""
    values = [2, 3, 7, 0.5, 0.25, 0.003, 1024, 4096, 65536, 65537, 500_000]
    num_held = 0
    for one, other in itertools.combinations(values, 2):
        first, second = Fraction(repr(one)), Fraction(repr(other))
        both = {"type": "number", "allOf": [{"multipleOf": one}, {"multipleOf": other}]}
        try:
            lets_number_through = schema_lets_through(both)
        except ValueError:
            continue
        num_held += 1
        for times in range(12):
            for number in (first * times, second * times):
                text = json.dumps(float(number)).removesuffix(".0")
                if lets_number_through(text):
                    assert (number / first).denominator == (number / second).denominator == 1
    assert num_held > 10

"""The test statistic on numbers whose p is known; breaks when a tail or a sign is lost."""

import random

import pytest

from .sign_flips import p_value


def test_known_values() -> None:
    assert p_value([1.0]) == 1.0
    assert p_value([1.0, -1.0]) == 1.0
    assert p_value([1.0, 2.0, 3.0]) == p_value([-1.0, -2.0, -3.0]) == 2 / 8
    assert p_value([3.0, 2.0, -1.0]) == 4 / 8  # +++, +-, and the same mirrored: sums 6 and 4
    assert p_value([0.1] * 10) == 2 / 1024


def test_noise_is_rejected_as_often_as_p_says() -> None:
    """Fails if the test never rejects, or does so at random."""
    draw = random.Random(1)
    ps = [p_value([draw.gauss(0, 1) for _ in range(8)]) for _ in range(500)]
    assert sum(p <= 0.1 for p in ps) / len(ps) == pytest.approx(0.1, abs=0.04)
    leaning = [p_value([draw.gauss(2, 1) for _ in range(8)]) for _ in range(100)]
    assert sum(p <= 0.01 for p in leaning) > 80

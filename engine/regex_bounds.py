"""What a regular expression may cost, wherever a guide has one. No JAX."""

MAX_REPETITIONS = 2_000
"""Repetition operators of one expression.

llguidance compiles them in quadratic time before it meets a limit of its own: 37,000 took 100 s,
with 5,000 it took 3 s at most and said that they are too many.
"""


def check_repetitions(expression: str) -> None:
    """Raises ValueError if there are too many; those that stand for themselves count too."""
    found = sum(map(expression.count, "*+?{"))
    if found > MAX_REPETITIONS:
        raise ValueError(
            f"a regular expression has {found} repetitions; it must have at most {MAX_REPETITIONS}"
        )

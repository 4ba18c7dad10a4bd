"""What llguidance says of a guide that fails, as errors with reasons for people. No JAX."""

from collections.abc import Generator
from contextlib import contextmanager

from .guided_masks import GuideError

MAX_REASON_CHARACTERS = 500


def shortened(reason: str) -> str:
    """On one line, without the library's own state, of bounded length."""
    for mark in ("<non-verbose/>", "<backtrace>", "<state>"):
        reason = reason.partition(mark)[0]
    reason = " ".join(reason.split())
    return (
        reason if len(reason) <= MAX_REASON_CHARACTERS else reason[:MAX_REASON_CHARACTERS] + "..."
    )


@contextmanager
def panics_as(error_type: type[ValueError | GuideError]) -> Generator[None]:
    """What the library panics of inside is an error of this type."""
    try:
        yield
    except BaseException as error:
        # A Rust library that panics raises what is no Exception, in a type that cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise error_type(shortened(f"llguidance failed: {error}")) from error

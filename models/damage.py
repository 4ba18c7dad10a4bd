"""What parsers raise on damaged files becomes a CheckpointError. No JAX."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .metadata import CheckpointError


@contextmanager
def damage_named(source: Path) -> Generator[None]:
    """Reads other people's files inside; whatever goes wrong there is a CheckpointError.

    Our parsers say what is wrong where they can foresee it. Those below them, in Python, C++ and
    Rust, fail on damaged bytes in more ways than can be listed.

    Args:
      source: The file or folder; begins the message.
    """
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except BaseException as error:
        # A Rust library that panics raises what is no Exception, in a type that cannot be imported.
        kind = type(error).__name__
        if not isinstance(error, Exception) and kind != "PanicException":
            raise
        raise CheckpointError(f"{source}: cannot be understood: {kind}: {error}") from error

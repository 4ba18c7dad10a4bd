"""A server in this process with a real engine, on a port of its own."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from octavo.models.fetch import default_cache_dir
from octavo.server.engine_flags import ModelOptions
from octavo.server.local_server import local_server
from octavo.server.model_loading import load_model
from tests.engine.conftest import TINY_ENGINE, ignore_progress

COMPILED = default_cache_dir() / "compiled-by-tests"


@contextmanager
def serving(folder: Path) -> Generator[str]:
    """Serves the tiny model of a folder; yields host:port."""
    options = ModelOptions(
        model=str(folder),
        served_name=None,
        engine=TINY_ENGINE,
        cache_dir=Path(),
        compilation_cache_dir=COMPILED,
    )
    with local_server(partial(load_model, options), ignore_progress) as address:
        yield address

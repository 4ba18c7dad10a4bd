"""Fixtures that several folders' tests share."""

import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

from octavo.configs.presets import DEFAULT_PRESET
from octavo.models.fetch import default_cache_dir, fetch

# A busy machine is no failure: how long one example takes says nothing.
hypothesis.settings.register_profile("octavo", deadline=None)
hypothesis.settings.load_profile("octavo")


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_counts() -> None:
    """A shell's `&` has the tests ignore SIGINT, which the processes that they start would inherit;
    those that are to be interrupted would go on.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's weights, fetched the way `octavo fetch` does, into the user's cache."""
    return fetch(DEFAULT_PRESET, default_cache_dir())


@pytest.fixture
def types_unchecked() -> Iterator[None]:
    """Annotations are not checked, as in production: for tests of what wrong types run into."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

"""Fixtures that several folders' tests share."""

from pathlib import Path

import pytest

from octavo.configs.presets import DEFAULT_PRESET
from octavo.models.fetch import default_cache_dir, fetch


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's weights, fetched the way `octavo fetch` does, into the user's cache."""
    return fetch(DEFAULT_PRESET, default_cache_dir())

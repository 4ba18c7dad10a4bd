"""`octavo fetch`: brings a preset's weights into the cache and prints where they are."""

from collections.abc import Sequence

from absl import flags

from ..configs.presets import fetchable_preset_names, preset_names
from ..models.fetch import FetchError, default_cache_dir, fetch
from .command_line import Command, CommandError, UsageError


def define_flags(values: flags.FlagValues) -> None:
    """Has no flags of its own; the cache is $OCTAVO_CACHE, or .cache/octavo at home."""


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Fetches; a file that is there already is only verified."""
    (name,) = positionals
    if name not in preset_names():
        raise UsageError(
            f"NAME is {name!r}; it must be one of {', '.join(fetchable_preset_names())}"
        )
    try:
        print(fetch(name, default_cache_dir()))
    except FetchError as error:
        raise CommandError(str(error)) from error
    return 0


COMMAND = Command(
    name="fetch",
    summary="Brings a preset's weights into the cache. Presets: "
    f"{', '.join(fetchable_preset_names())}.",
    positionals=("NAME",),
    define_flags=define_flags,
    run=run,
)

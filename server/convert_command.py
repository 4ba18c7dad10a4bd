"""`octavo convert`: writes a checkpoint in the format that loads fastest."""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from ..configs.presets import fetchable_preset_names
from ..models.checkpoint import CheckpointError
from ..models.convert import convert
from .command_line import Command, CommandError, UsageError, check_utf8
from .engine_flags import define_dtype_flag


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `octavo convert`."""
    define_dtype_flag(values, "Of the weights that are written.")


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Converts SRC into the new folder DST and prints where it is."""
    check_utf8("DST", positionals[1])
    source, destination = map(Path, positionals)
    if positionals[0] in fetchable_preset_names() and not source.exists():
        raise UsageError(
            f"SRC is {positionals[0]!r}, a preset; it must be a path, which `octavo fetch "
            f"{positionals[0]}` prints"
        )
    try:
        convert(source, destination, values.dtype)
    except (CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error
    print(destination)
    return 0


COMMAND = Command(
    name="convert",
    summary="Writes the checkpoint SRC (a GGUF file or a Hugging Face folder) as the new folder "
    "DST, in the format that loads fastest.",
    positionals=("SRC", "DST"),
    define_flags=define_flags,
    run=run,
)

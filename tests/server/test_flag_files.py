"""The flag files that the README names: each is one that `serve` and `plan` take as it is."""

from pathlib import Path
from types import ModuleType

import pytest
from absl import flags

from octavo.server import plan_command, serve_command
from octavo.server.engine_flags import ALL_FIELDS, model_options

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.flags"))


def parsed(command: ModuleType, file: Path) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_multi_string("flagfile", None, "", flag_values=values)
    command.define_flags(values)
    values(["octavo", f"--flagfile={file}"])
    return values


def test_there_are_some() -> None:
    assert [file.stem for file in FILES] == ["gpu", "tpu"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_serve_and_plan_take_it(file: Path) -> None:
    options = model_options(parsed(serve_command, file), ALL_FIELDS)
    assert options.engine.page_size >= 64
    assert parsed(plan_command, file).page_size == options.engine.page_size

"""What is installed is what is in the tree.

Breaks when a folder grows a subpackage (seen by the editable install, missing from the wheel), when
a new folder is not listed in pyproject.toml, or when data files stay behind.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
# Of the files that a folder installs.
SUFFIXES = (".py", ".pyi", ".toml", ".proto")


def test_every_folder_is_a_package_of_the_distribution() -> None:
    assert SETUPTOOLS["packages"] == [f"octavo.{folder}" for folder in FOLDERS]
    assert SETUPTOOLS["package-dir"] == {f"octavo.{folder}": folder for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_flat_and_typed(folder: str) -> None:
    directories = {path.name for path in (ROOT / folder).iterdir() if path.is_dir()}
    assert directories <= {"__pycache__"}
    assert (ROOT / folder / "py.typed").is_file()


def test_octavo_is_a_namespace_without_files_of_its_own() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "octavo").exists()


def test_the_console_script_exists() -> None:
    (script,) = importlib.metadata.distribution("octavo").entry_points.select(name="octavo")
    assert callable(script.load())


@pytest.mark.full
def test_the_wheel_holds_the_tree_and_nothing_else(tmp_path: Path) -> None:
    """Builds a wheel; `full` because pip makes a build environment for it."""
    # From a copy: setuptools leaves a build folder, and takes stale files from one that it finds.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path), str(source)], check=True, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == {
        f"octavo/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).iterdir()
        if path.suffix in SUFFIXES or path.name == "py.typed"
    }

"""What the documents name exists.

Breaks when a flag is renamed or a file moves and the README or the build notes stay behind.
"""

import re
from pathlib import Path

import pytest
from absl import flags

from octavo.server.serve_command import define_flags

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "BUILD_NOTES.md")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_flag_in_the_table_is_a_flag_of_serve() -> None:
    rows = [
        line.split("|")[1] for line in read("README.md").splitlines() if line.startswith("| `--")
    ]
    named = {name for row in rows for name in re.findall(r"--(\w+)", row)}
    values = flags.FlagValues()
    define_flags(values)
    assert named
    assert named <= set(values)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", read(name))
    local = [target for target in targets if not target.startswith("https://")]
    assert local
    assert [target for target in local if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_are_named_exist(name: str) -> None:
    paths = re.findall(r"`((?:\w+|\.ci)/[\w./-]+\.\w+)`", read(name))
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_targets_that_are_named_exist(name: str) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", read(name), re.MULTILINE))
    assert named
    assert named <= set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))


def test_the_example_is_python() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", read("README.md"), re.DOTALL)
    compile(example, "README.md", "exec")

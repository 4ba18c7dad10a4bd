"""Which interpreter runs the peer.

Breaks when one that was named is not the one that runs, or one that does not work is taken.
"""

import sys
from pathlib import Path

import pytest

from octavo.bench.peer_environment import PEER_PYTHON_VARIABLE, find_base_python, find_peer_python
from octavo.server.command_line import CommandError

from .fakes import fake_python

NOTHING = Path("/no/such/folder")


def test_the_flag_comes_before_the_variable_before_the_folder(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    made = fake_python(tmp_path / "bin")
    Path(made).rename(tmp_path / "bin" / "python")
    named = fake_python(tmp_path)
    variable = {PEER_PYTHON_VARIABLE: named}
    found = find_peer_python(None, {}, tmp_path)
    assert found.path == str(tmp_path / "bin" / "python")
    assert found.versions["transformers"] == "5"
    assert find_peer_python(None, variable, tmp_path).path == named
    assert find_peer_python(found.path, variable, NOTHING).path == found.path


def test_none_says_how_to_make_one() -> None:
    with pytest.raises(
        CommandError, match=r"no peer environment in /no/such/folder; make one with"
    ):
        find_peer_python(None, {}, NOTHING)


@pytest.mark.parametrize("is_chosen", [True, False])
def test_one_without_the_packages_says_what_is_missing(tmp_path: Path, is_chosen: bool) -> None:
    """This very interpreter has no torch. What was named is never replaced by something else."""
    chosen = sys.executable if is_chosen else None
    source = "--peer_python" if is_chosen else rf"\${PEER_PYTHON_VARIABLE}"
    with pytest.raises(CommandError, match=rf"^{source} is .*No module named 'accelerate'.*make"):
        find_peer_python(chosen, {PEER_PYTHON_VARIABLE: sys.executable}, tmp_path)


@pytest.mark.parametrize("answer", ["exit 1", "exit 0", "echo hello"])
def test_one_that_is_no_python_is_refused(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    with pytest.raises(CommandError, match=rf"--peer_python is '{path}'; it "):
        find_peer_python(str(path), {}, tmp_path)


def test_the_base_is_judged_by_running_it(tmp_path: Path) -> None:
    """pyenv leaves shims with nothing behind them on PATH."""
    shim = tmp_path / "python3.11"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    missing = str(tmp_path / "missing")
    assert find_base_python({}, [missing, str(shim), sys.executable, "never"]) == sys.executable
    good = fake_python(tmp_path)
    assert find_base_python({}, [missing, str(shim), good]) == good
    assert find_base_python({}, [missing, str(shim)]) == sys.executable

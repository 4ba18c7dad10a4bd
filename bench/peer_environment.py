"""The Python environment of the transformers peer: found by running it, made by `make peer-env`.

It is apart from Octavo's own, because torch and transformers bring dependencies of their own
versions, and because one process with two thread pools would measure neither well.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from absl import flags

from ..server.command_line import Command, CommandError
from .entry_point import main

PEER_PYTHON_VARIABLE = "OCTAVO_PEER_PYTHON"

REQUIREMENTS = ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0")
"""What the peer needs; the last two for GGUF files. Plain torch works on any CPU, but on many
indexes it brings CUDA libraries of gigabytes; pip's own settings can name one with CPU builds."""

_PROBE = """
import importlib.metadata as m, json, platform
import accelerate, gguf, torch, transformers
names = ("torch", "transformers", "accelerate", "gguf")
print(json.dumps({"python": platform.python_version()} | {n: m.version(n) for n in names}))
"""
_PROBE_TIMEOUT_S = 300.0

_HOW_TO_MAKE_ONE = (
    "make one with `make peer-env`, or name the Python of an environment that has "
    f"{', '.join(REQUIREMENTS)} by --peer_python or ${PEER_PYTHON_VARIABLE}"
)


@dataclass(frozen=True, kw_only=True)
class PeerPython:
    """An interpreter that can run the peer.

    Attributes:
      path: Of the interpreter.
      versions: Of "python" and of the packages that matter.
    """

    path: str
    versions: dict[str, str]


def default_directory() -> Path:
    """Where `make peer-env` makes the environment: in the checkout, ignored by git."""
    return Path(__file__).parents[1] / ".cache" / "peer-venv"


def find_peer_python(chosen: str | None, environ: Mapping[str, str], directory: Path) -> PeerPython:
    """The interpreter to run the peer with.

    Args:
      chosen: Its path, from the command line. None: from the environment, else in `directory`.
      environ: The process's environment variables.
      directory: Of the environment that `make peer-env` makes.

    Raises:
      CommandError: There is none, or it lacks a package; says how to make one.
    """
    if chosen:
        source, path = "--peer_python", chosen
    elif from_environment := environ.get(PEER_PYTHON_VARIABLE):
        source, path = f"${PEER_PYTHON_VARIABLE}", from_environment
    else:
        source, path = "peer environment", str(directory / "bin" / "python")
        if not Path(path).exists():
            raise CommandError(f"there is no peer environment in {directory}; {_HOW_TO_MAKE_ONE}")
    try:
        versions = _probe(path)
    except CommandError as error:
        raise CommandError(f"{source} is {path!r}; {error}; {_HOW_TO_MAKE_ONE}") from error
    return PeerPython(path=path, versions=versions)


def _probe(path: str) -> dict[str, str]:
    """Versions, as the interpreter itself says; importing is the only proof that it works."""
    done = _run([path, "-c", _PROBE])
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        raise CommandError(f"it ends with {done.returncode}: {said[0]}")
    try:
        versions = json.loads(done.stdout.splitlines()[-1])
        return {str(name): str(version) for name, version in versions.items()}
    except (ValueError, IndexError, AttributeError) as error:
        raise CommandError(f"it does not answer as a Python does: {done.stdout!r}") from error


def find_base_python(environ: Mapping[str, str], candidates: Sequence[str] | None = None) -> str:
    """An interpreter to make the environment from: Python 3.11 if there is one, else this one.

    Some indexes have torch's CPU build for 3.11 and CUDA builds for what is newer. A name on PATH
    may be a shim with nothing behind it, or a Python without venv; so each candidate is run.

    Args:
      environ: The process's environment variables.
      candidates: Paths to try. None: on PATH and in pyenv's folder.
    """
    if candidates is None:
        folders = environ.get("PATH", "").split(os.pathsep)
        pyenv = Path(environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
        candidates = [
            *(f"{folder}/python3.11" for folder in folders),
            *sorted(map(str, pyenv.glob("versions/3.11*/bin/python"))),
        ]
    for candidate in candidates:
        with suppress(CommandError):
            if _run([candidate, "-c", "import ensurepip, venv"]).returncode == 0:
                return candidate
    return sys.executable


def make_environment(base: str, directory: Path) -> PeerPython:
    """Makes the environment, or takes on what is there already.

    Args:
      base: The interpreter to make it from.
      directory: Where.

    Raises:
      CommandError: The interpreter or pip failed.
    """
    python = str(directory / "bin" / "python")
    for command in (
        [base, "-m", "venv", str(directory)],
        [python, "-m", "pip", "install", "--quiet", *REQUIREMENTS],
    ):
        print(" ".join(command), file=sys.stderr)
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CommandError(str(error)) from error
    return find_peer_python(python, {}, directory)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(str(error)) from error


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    flags.DEFINE_string(
        "python",
        None,
        "Interpreter to make it from. Default: a Python 3.11 if there is one, else this one.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "directory", str(default_directory()), "Where to make it.", flag_values=values
    )


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Makes it, and says what is in it."""
    base = values.python or find_base_python(os.environ)
    peer = make_environment(base, Path(values.directory))
    print(f"{peer.path}: {peer.versions}")
    return 0


COMMAND = Command(
    program="python -m",
    name="octavo.bench.peer_environment",
    summary="Makes the Python environment that compare_transformers runs its peer in.",
    define_flags=define_flags,
    run=run,
)

if __name__ == "__main__":
    sys.exit(main(COMMAND))

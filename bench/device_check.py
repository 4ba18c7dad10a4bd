"""`python3 bench/device_check.py --out=FILE.json`: what only a real accelerator can show.

Run it as a file, from a checkout that need not be installed: right kernels, their times, a decode
step of an 8B model, whole requests. It needs JAX with its device and the few packages below, but no
network, takes less than eight minutes, and writes what it has found so far after every task. See
device_parts for the parts, and --help.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 12)
NEEDED = ("absl", "flax", "jax", "jaxtyping", "psutil")


def unready() -> str:
    """Why this Python cannot run it; empty: it can."""
    if sys.version_info < OLDEST_PYTHON:
        return f"this Python is {sys.version.split()[0]}; it must be 3.12 or newer"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"this Python has no {', '.join(missing)}" if missing else ""


def make_namespace(name: str, folder: Path) -> None:
    """Makes imports of `name.x` find `folder/x`, whatever is installed under that name."""
    namespace = types.ModuleType(name)
    namespace.__path__ = [str(folder)]
    sys.modules[name] = namespace


def main() -> int:
    """Runs the command of this checkout; returns the exit code."""
    if reason := unready():
        print(
            f"device_check: {reason}. After `make setup`, .venv/bin/python has it all, and after "
            "pip install '.[cuda]' it finds the GPU.",
            file=sys.stderr,
        )
        return 2
    # Python looks for modules beside a script first, and these are parts of a package.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT / "bench"]
    make_namespace("octavo", ROOT)
    # The cases are the tests' own; and more than one package installs a folder of that name.
    make_namespace("tests", ROOT / "tests")
    return importlib.import_module("octavo.bench.device_command").main()


if __name__ == "__main__":
    sys.exit(main())

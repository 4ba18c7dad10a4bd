"""`python3 bench/device_check.py --out=FILE.json`: what only a real accelerator can show.

Run it as a file, from a checkout that need not be installed: right kernels, their times, a decode
step of an 8B model, whole requests. It needs what engine.build needs and no network, takes less
than eight minutes, and writes what it has found so far after every task. See device_parts for the
parts, and --help.
"""

import importlib
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make_namespace(name: str, folder: Path) -> None:
    """Makes imports of `name.x` find `folder/x`, whatever is installed under that name."""
    namespace = types.ModuleType(name)
    namespace.__path__ = [str(folder)]
    sys.modules[name] = namespace


def main() -> int:
    """Runs the command of this checkout; returns the exit code."""
    # Python looks for modules beside a script first, and these are parts of a package.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT / "bench"]
    make_namespace("octavo", ROOT)
    # The cases are the tests' own; and more than one package installs a folder of that name.
    make_namespace("tests", ROOT / "tests")
    return importlib.import_module("octavo.bench.device_command").main()


if __name__ == "__main__":
    sys.exit(main())

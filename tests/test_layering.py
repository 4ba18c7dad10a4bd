"""Imports run one way: server, bench -> engine -> models -> pallas_kernels; configs below all.

Breaks when a folder reaches up, when a folder is imported by its bare name (which would load a
second copy of every class in it), or when what the scheduler needs starts to need JAX.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each folder may import of the others.
ALLOWED = {
    "configs": set(),
    "pallas_kernels": {"configs"},
    "models": {"configs", "pallas_kernels"},
    "engine": {"configs", "pallas_kernels", "models"},
    "server": {"configs", "pallas_kernels", "models", "engine"},
    "bench": {"configs", "pallas_kernels", "models", "engine", "server"},
}
# configs promises the standard library alone, so that a launcher can read it anywhere.
STANDARD_LIBRARY_ONLY = ("configs",)
# What the scheduler needs; what front ends need of models; and the client of a remote server.
WITHOUT_JAX = (
    "configs.chips",
    "configs.engine_config",
    "configs.model_config",
    "configs.presets",
    "engine.admission",
    "engine.engine",
    "engine.engine_thread",
    "engine.kv_budget",
    "engine.packing",
    "engine.page_pool",
    "engine.plan_cache",
    "engine.plan_figures",
    "engine.plan_processes",
    "engine.request",
    "engine.router",
    "engine.scheduler",
    "engine.simulator",
    "engine.step_shapes",
    "models.chat_template",
    "models.detokenizer",
    "models.fetch",
    "models.gguf_config",
    "models.gguf_file",
    "models.huggingface_config",
    "models.metadata",
    "models.tokenizer",
    "server.chat_command",
    "server.generate_command",
    "server.server",
)


def imported_modules(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Of all that a file imports: line, dotted name as from outside, whether it was relative."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, False
        elif isinstance(node, ast.ImportFrom):
            # One dot is the file's own folder, two dots are the repository. `from .. import x`
            # names the folder only in its aliases.
            above = {0: "", 1: f"octavo.{path.parent.name}", 2: "octavo"}[node.level]
            base = ".".join(part for part in (above, node.module) if part)
            yield node.lineno, base, node.level > 0
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", node.level > 0


def violations(path: Path, folder: str) -> list[str]:
    """What a file of a folder imports and must not."""
    found = []
    is_generated = path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    for line, name, is_relative in imported_modules(path):
        parts = name.split(".")
        where = f"{path.relative_to(path.parents[1])}:{line} imports {name}"
        if parts[0] in {*ALLOWED, "tests"}:
            found.append(f"{where}: by its bare name")
        elif parts[0] == "octavo" and not (is_relative or is_generated):
            found.append(f"{where}: inside the folders imports are relative")
        elif parts[0] == "octavo" and len(parts) > 1:
            if parts[1] not in {folder, *ALLOWED[folder]}:
                found.append(f"{where}: {folder} may import only {sorted(ALLOWED[folder])}")
        elif folder in STANDARD_LIBRARY_ONLY and parts[0] not in sys.stdlib_module_names:
            found.append(f"{where}: {folder} imports the standard library only")
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_down(folder: str) -> None:
    files = sorted((ROOT / folder).glob("*.py"))
    assert files
    assert [bad for path in files for bad in violations(path, folder)] == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("engine", "from ..server import service"),
        ("engine", "from ..server.service import Service"),
        ("engine", "from .. import server"),
        ("engine", "def late():\n    from ..bench import load"),
        ("models", "from ..engine.request import Request"),
        ("configs", "from ..models import fetch"),
        ("configs", "import numpy as np"),
        ("models", "import configs.presets"),
        ("models", "from configs import presets"),
        ("engine", "from tests import fakes"),
        ("server", "from octavo.engine import request"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, folder: str, source: str) -> None:
    """The check itself: without this, one that finds nothing would pass."""
    path = tmp_path / folder / "module.py"
    path.parent.mkdir()
    path.write_text(source)
    assert violations(path, folder)


def test_every_folder_has_a_layer() -> None:
    """A new source folder must get a place in the order above."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(ALLOWED)


def test_what_promises_so_needs_no_jax() -> None:
    """A None in sys.modules makes `import jax` fail, however deep down it happens."""
    code = (
        "import sys, importlib\n"
        "sys.modules.update(dict.fromkeys(['jax', 'jaxlib', 'flax']))\n"
        f"for name in {WITHOUT_JAX!r}: importlib.import_module('octavo.' + name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""Answers of the compiler, kept on disk: the same question is not compiled twice. No JAX.

An answer's name is a hash of everything that it depends on, so that none is ever wrong: the job,
the versions and settings of all that compiles, and the sources of all that is compiled.
"""

import hashlib
import importlib.metadata
import logging
import os
import platform
import tempfile
from contextlib import suppress
from pathlib import Path

from .plan_records import CompiledPlan, PlanJob, plan_from_json, plan_to_json
from .source_digest import source_digest

_PACKAGES = (
    "flax",
    "jax",
    "jax-cuda13-pjrt",
    "jax-cuda13-plugin",
    "jaxlib",
    "libtpu",
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
)
_SETTINGS = ("JAX_", "LIBTPU_", "XLA_")  # how variables begin that compilers look at
_FOLDERS = ("configs", "pallas_kernels", "models", "engine")

_log = logging.getLogger(__name__)


def job_key(job: PlanJob) -> str:
    """Names the answer to a job, here and now."""
    parts = [repr(job), platform.python_version(), platform.machine()]
    for package in _PACKAGES:
        version = None
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
        parts.append(f"{package} {version}")
    parts += sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_SETTINGS))
    digest = hashlib.sha256("\n".join(parts).encode())
    digest.update(source_digest(_FOLDERS))
    return digest.hexdigest()


def read_answer(folder: Path, key: str) -> CompiledPlan | None:
    """The answer that is kept under a name, if there is one that can be read."""
    try:
        return plan_from_json((folder / f"{key}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s: %s; compiling again", folder / f"{key}.json", error)
        return None


def write_answer(folder: Path, key: str, plan: CompiledPlan) -> None:
    """Keeps an answer. That it cannot be written costs the next run time, and nothing else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Renamed when it is whole: two runs may write at once.
        handle, name = tempfile.mkstemp(dir=folder, prefix=".answer-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(plan_to_json(plan))
        Path(name).replace(folder / f"{key}.json")
    except OSError as error:
        _log.warning("%s: %s; the answer is not kept", folder, error)

"""What a process that compiles for a chip is started with, and which extra it lacks.

Breaks when a compiler would look for its chip, or run another ptxas than the one that is watched.
"""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from octavo.configs.chips import parse_chips
from octavo.engine import aot_environment
from octavo.engine.aot_environment import environment, missing_extra, ptxas_logs
from octavo.engine.plan_ptxas import LOG_VARIABLE, REAL_VARIABLE

OWN = {"PATH": "/usr/bin", "HOME": "/home", "XLA_FLAGS": "--xla_dump_to=/d", "JAX_PLATFORMS": "gpu"}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Which packages are installed, and where; nothing else is found."""
    installed: dict[str, str] = {}

    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        if name not in installed:
            if "." in name:
                raise ModuleNotFoundError(name)
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [installed[name]]
        return spec

    monkeypatch.setattr(aot_environment.importlib.util, "find_spec", find_spec)
    return installed


def test_what_is_missing_is_named_by_the_extra_that_brings_it(packages: dict[str, str]) -> None:
    assert [missing_extra(platform) for platform in ("cpu", "tpu", "gpu")] == [
        None,
        "plan-tpu",
        "plan-gpu",
    ]
    packages["jax_plugins.xla_cuda13"] = packages["libtpu"] = "/somewhere"
    assert (missing_extra("tpu"), missing_extra("gpu")) == (None, "plan-gpu")
    packages["nvidia.cu13"] = "/somewhere"
    assert missing_extra("gpu") is None


def test_cpus_are_counted_and_flags_kept(tmp_path: Path) -> None:
    (devices,) = parse_chips("cpu-8")
    changed = environment(devices, tmp_path, OWN)
    assert changed == OWN | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_dump_to=/d --xla_force_host_platform_device_count=8",
    }


def test_tpu_compilers_run_side_by_side(tmp_path: Path) -> None:
    """Without the last, the second process fails on the lock of the first."""
    (devices,) = parse_chips("v5e-8")
    changed = environment(devices, tmp_path, OWN)
    assert (changed["JAX_PLATFORMS"], changed["TPU_SKIP_MDS_QUERY"]) == ("cpu", "1")
    assert changed["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


def test_the_watched_ptxas_comes_first(tmp_path: Path, packages: dict[str, str]) -> None:
    """XLA looks in CUDA_ROOT, Mosaic GPU on PATH; both need the other tools beside it."""
    real = tmp_path / "real"
    (real / "bin").mkdir(parents=True)
    (real / "nvvm").mkdir()
    for tool in ("ptxas", "nvlink"):
        (real / "bin" / tool).write_text(tool)
    packages["nvidia.cu13"] = str(real)
    (devices,) = parse_chips("h100-1")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    changed = environment(devices, scratch, OWN)
    toolkit = Path(changed["CUDA_ROOT"])
    assert changed["PATH"] == f"{toolkit}/bin:/usr/bin"
    assert changed[REAL_VARIABLE] == str(real / "bin" / "ptxas")
    assert changed[LOG_VARIABLE] == str(ptxas_logs(scratch))
    assert ptxas_logs(scratch).is_dir()
    assert (toolkit / "bin" / "nvlink").read_text() == "nvlink"
    assert (toolkit / "bin" / "ptxas").read_text().startswith("#!/bin/sh\n")
    assert (toolkit / "nvvm").samefile(real / "nvvm")
    assert (real / "bin" / "ptxas").read_text() == "ptxas"

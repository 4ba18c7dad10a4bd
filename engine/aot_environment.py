"""Compilers for chips that are not there: what they need installed, and set before JAX starts.

libtpu holds the compilers of all TPUs. JAX's CUDA plugin holds XLA's GPU compiler, and ptxas and
libdevice come from the CUDA compiler's wheels. No chip and no driver is needed. No JAX here: what
this says is for a process that is yet to start.

A process may compile for one GPU architecture only: Mosaic GPU keeps the first one it meets.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from ..configs.chips import Devices, Platform
from . import plan_ptxas

CUDA_PLUGIN = "jax_plugins.xla_cuda13"
_CUDA_TOOLKIT = "nvidia.cu13"  # the folder that NVIDIA's wheels share

_NEEDED: dict[Platform, tuple[str, ...]] = {
    "cpu": (),
    "tpu": ("libtpu",),
    "gpu": (CUDA_PLUGIN, _CUDA_TOOLKIT),
}


def missing_extra(platform: Platform) -> str | None:
    """The extra of Octavo that brings a platform's compiler, if that is not installed."""
    is_there = all(map(_is_installed, _NEEDED[platform]))
    return None if is_there else f"plan-{platform}"


def environment(devices: Devices, scratch: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that compiles for some devices.

    Args:
      devices: What for.
      scratch: An empty folder for that process.
      environ: The variables of this process.
    """
    # Or JAX would look for chips, and for libraries that compiling does not need.
    changed = {"JAX_PLATFORMS": "cpu"}
    match devices.chip.platform:
        case "cpu":
            flags = environ.get("XLA_FLAGS", "")
            count = f"--xla_force_host_platform_device_count={devices.count}"
            changed["XLA_FLAGS"] = f"{flags} {count}".strip()
        case "tpu":
            # libtpu asks a cloud's metadata server what machine this is, and takes a lock that
            # stands for the chips, of which there are none.
            changed |= {
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_ACCELERATOR_TYPE": "v5litepod-1",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            }
        case "gpu":
            toolkit, real = scratch / "cuda", package_folder(_CUDA_TOOLKIT)
            _make_toolkit(toolkit, real)
            ptxas_logs(scratch).mkdir()
            changed |= {
                # XLA takes the tools of CUDA_ROOT, Mosaic GPU those of PATH.
                "CUDA_ROOT": str(toolkit),
                "PATH": f"{toolkit / 'bin'}:{environ.get('PATH', '')}",
                plan_ptxas.REAL_VARIABLE: str(real / "bin" / "ptxas"),
                plan_ptxas.LOG_VARIABLE: str(ptxas_logs(scratch)),
            }
    return dict(environ) | changed


def ptxas_logs(scratch: Path) -> Path:
    """Where the process of that scratch folder keeps what ptxas said."""
    return scratch / "ptxas"


def package_folder(package: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    assert spec.submodule_search_locations, package
    return Path(spec.submodule_search_locations[0])


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package above it
        return False


def _make_toolkit(toolkit: Path, real: Path) -> None:
    """A CUDA toolkit like the real one, whose ptxas keeps what it says."""
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "nvvm").symlink_to(real / "nvvm")
    for tool in (real / "bin").iterdir():
        if tool.name != "ptxas":
            (toolkit / "bin" / tool.name).symlink_to(tool)
    script = toolkit / "bin" / "ptxas"
    script.write_text(plan_ptxas.SCRIPT, encoding="utf-8")
    script.chmod(0o755)

"""Devices that only compile: the real compilers of chips that are not there.

The process must have been started with `aot_environment.environment`.
"""

import mmap
import re

import jax
from jax.experimental import topologies

from ..configs.chips import Devices
from .aot_environment import CUDA_PLUGIN, package_folder

_PLUGIN_FILE = "xla_cuda_plugin.so"
# A text-format GpuTargetConfigProto, as it lies among the plugin's constants.
_TARGET = rb'gpu_device_info \{\n[\x09\x0a\x20-\x7e]*?device_description_str: "([^"]+)"\n'


def aot_devices(devices: Devices) -> list[jax.Device]:
    """What programs can be compiled for; only CPUs hold anything."""
    match devices.chip.platform:
        case "cpu":
            return jax.devices()
        case "tpu":
            topology = topologies.get_topology_desc(
                platform="tpu", topology_name=devices.chip.topologies[devices.count]
            )
        case "gpu":
            topology = topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                target_config=gpu_target(devices.chip.target),
                topology=f"1x1x{devices.count}",  # one process on one host, so many GPUs
            )
    return list(topology.devices)


def gpu_target(name: str) -> str:
    """XLA's description of a GPU, from the installed plugin.

    Raises:
      LookupError: The plugin knows no GPU of that name.
    """
    with (
        (package_folder(CUDA_PLUGIN) / _PLUGIN_FILE).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        for found in re.finditer(_TARGET, content):
            if found[1].decode() == name:
                return found[0].decode()
    raise LookupError(f"the installed CUDA plugin does not know {name!r}")

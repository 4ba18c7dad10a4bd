"""The chips that `octavo plan` knows, and what bounds a model on them. Standard library only.

A device is what JAX calls one: a chip, or one of the two halves of a TPU7x chip. Bandwidths and
flops are the makers' peaks, per device; nothing here was measured. Looked up on 30 November 2026:
TPUs at https://docs.cloud.google.com/tpu/docs/NAME, GPUs at the addresses beside them.
"""

import difflib
import re
from dataclasses import dataclass, field
from typing import Literal

Platform = Literal["tpu", "gpu", "cpu"]

_GIB = 1 << 30
MAX_CPU_DEVICES = 64


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of device.

    Attributes:
      name: As `--chips` calls it.
      platform: Whose compiler it needs.
      memory_bytes: What a process can have of one device's memory. None: as much as the host has.
      bytes_per_s: Bandwidth of that memory. None: not known, and nothing is bounded by it.
      bf16_flops: Peak of dense bfloat16 matrix products, in flops per second. None: not known.
      link_bytes_per_s: What one device sends to the others per second, over all its links. None:
        not known.
      switch_sums: Whether what lies between the devices can add up what they send.
      topologies: Of TPUs, by number of devices: as the compiler calls them.
      target: Of GPUs: the name under which the compiler knows the device.
    """

    name: str
    platform: Platform
    memory_bytes: int | None
    bytes_per_s: float | None
    bf16_flops: float | None
    link_bytes_per_s: float | None
    switch_sums: bool = False
    topologies: dict[int, str] = field(default_factory=dict, hash=False)
    target: str = ""

    @property
    def counts(self) -> tuple[int, ...]:
        """How many devices there may be, ascending."""
        if self.platform == "tpu":
            return tuple(sorted(self.topologies))
        return tuple(range(1, MAX_CPU_DEVICES + 1)) if self.platform == "cpu" else (1, 2, 4, 8)


def _tpu(
    name: str,
    usable_gib: float,
    bytes_per_s: float,
    bf16_flops: float,
    link_bytes_per_s: float,
    topologies: dict[int, str],
) -> Chip:
    return Chip(
        name=name,
        platform="tpu",
        # What libtpu 0.0.52 says is available when a program asks for more.
        memory_bytes=int(usable_gib * _GIB),
        bytes_per_s=bytes_per_s,
        bf16_flops=bf16_flops,
        # Google counts both directions.
        link_bytes_per_s=link_bytes_per_s / 2,
        topologies={count: f"{name}:{shape}" for count, shape in topologies.items()},
    )


GPU_MEMORY_SHARE = 0.9
"""What serving gives to JAX of a GPU's memory (XLA_PYTHON_CLIENT_MEM_FRACTION); the rest is for the
CUDA context and for the libraries' own workspaces."""


def _gpu(
    name: str,
    target: str,
    device_bytes: int,
    bytes_per_s: float,
    bf16_flops: float,
    link_bytes_per_s: float,
    *,
    switch_sums: bool,
) -> Chip:
    return Chip(
        name=name,
        platform="gpu",
        # Device memory and its bandwidth are those of the compiler's own description of the target.
        memory_bytes=int(device_bytes * GPU_MEMORY_SHARE),
        bytes_per_s=bytes_per_s,
        bf16_flops=bf16_flops,
        link_bytes_per_s=link_bytes_per_s / 2,  # NVIDIA counts both directions
        # NVSwitch does (NVLink SHARP) with NVLink 4 and 5, of Hopper and Blackwell; new with 4:
        # https://developer.nvidia.com/blog/upgrading-multi-gpu-interconnectivity-with-the-third-generation-nvidia-nvswitch/
        # https://docs.nvidia.com/nvshmem/release-notes-install-guide/release-notes/release-3205.html
        switch_sums=switch_sums,
        target=target,
    )


_FLAT = {1: "1x1", 4: "2x2", 8: "2x4"}

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu("v5e", 15.75, 819e9, 197e12, 400e9, _FLAT),
        _tpu("v6e", 31.24, 1638e9, 918e12, 800e9, _FLAT),
        _tpu("v5p", 95.73, 2765e9, 459e12, 1200e9, {1: "1x1x1", 4: "2x2x1", 8: "2x2x2"}),
        # A chip is two devices, each with half of everything.
        _tpu("tpu7x", 94.74, 3690e9, 1153.5e12, 600e9, {2: "1x1x1", 8: "2x2x1", 16: "2x2x2"}),
        # https://www.nvidia.com/en-us/data-center/a100/
        _gpu(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            85_100_068_864,
            2039.04e9,
            312e12,
            600e9,
            switch_sums=False,
        ),
        # https://www.nvidia.com/en-us/data-center/h100/
        _gpu(
            "h100",
            "NVIDIA H100 80GB HBM3",
            84_942_979_072,
            3352.32e9,
            989.5e12,  # half of the figure with sparsity
            900e9,
            switch_sums=True,
        ),
        # https://www.nvidia.com/en-us/data-center/h200/
        _gpu(
            "h200",
            "NVIDIA H200 141GB HBM3e",
            151_397_597_184,
            4800e9,
            989.5e12,
            900e9,
            switch_sums=True,
        ),
        # https://www.nvidia.com/en-us/data-center/hgx/
        _gpu(
            "b200",
            "NVIDIA B200",
            191_514_411_008,
            7672.32e9,
            2250e12,
            1800e9,
            switch_sums=True,
        ),
        Chip(
            name="cpu",
            platform="cpu",
            memory_bytes=None,
            bytes_per_s=None,
            bf16_flops=None,
            link_bytes_per_s=None,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Devices:
    """So many devices of one kind, over which one model is split.

    Attributes:
      chip: The kind.
      count: How many, as JAX counts them.
    """

    chip: Chip
    count: int

    def __str__(self) -> str:
        """As `--chips` names them."""
        return f"{self.chip.name}-{self.count}"


def parse_chips(text: str) -> tuple[Devices, ...]:
    """Reads a list such as `v5e-8,h100-1,cpu-8`.

    Raises:
      ValueError: A part is not NAME-COUNT, its chip is not known, or it cannot be had in that
        count; the message begins with `chips`.
    """
    parts = [part.strip() for part in text.split(",")]
    devices = tuple(_parse_devices(text, part) for part in parts)
    for index, part in enumerate(parts):
        if part in parts[:index]:
            raise ValueError(f"chips is {text!r}; {part} must be there once")
    return devices


def _parse_devices(text: str, part: str) -> Devices:
    found = re.fullmatch(r"(\w+)-([1-9][0-9]{0,4})", part, re.ASCII)
    if found is None:
        raise ValueError(
            f"chips is {text!r}; {part!r} must be NAME-COUNT, such as h100-8, with NAME one of "
            f"{', '.join(CHIPS)}"
        )
    name, count = found[1], int(found[2])
    chip = CHIPS.get(name)
    if chip is None:
        close = difflib.get_close_matches(name, CHIPS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it must be one of {', '.join(CHIPS)}"
        raise ValueError(f"chips is {text!r}; no chip is called {name!r}: {hint}")
    if count not in chip.counts:
        counts = (
            f"1 to {MAX_CPU_DEVICES}"
            if chip.platform == "cpu"
            else ", ".join(map(str, chip.counts))
        )
        raise ValueError(f"chips is {text!r}; the number of {name} devices must be one of {counts}")
    return Devices(chip=chip, count=count)

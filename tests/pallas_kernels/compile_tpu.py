"""Compiles the TPU kernels for chips that are not there, and prints what they take of them.

    python -m tests.pallas_kernels.compile_tpu v5e v6e v5p tpu7x

One step of attention for each shape of the table, over page tables for 32k tokens and pages of more
than 2^31 elements; some of two layers; and some over two devices. The real compiler, from the extra
`plan-tpu`. Fails where a step does not compile or copies its cache, where a kernel takes more VMEM
than its limit or far more than was counted, and where a shape of the table is refused.
"""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from octavo.configs.chips import CHIPS, Devices
from octavo.engine import aot_environment
from octavo.engine.aot_devices import aot_devices
from octavo.pallas_kernels.tpu_backend import TpuBackend
from octavo.pallas_kernels.tpu_budget import VMEM_LIMIT_BYTES, choose_blocking, vmem_bytes
from octavo.pallas_kernels.tpu_cache import HeadLayout
from octavo.server.table import format_table

from .abstract_step import compile_step
from .attention_cases import Options, Shape
from .attention_table import table

MAX_LEN = 32768
POOL_BYTES = 12 << 30  # of all layers of a device: v5e has 15.75 GiB
MOST_OVER_COUNT = 1.3  # times what was counted that a kernel may take
HEADER = ["kernel", "shape", "chip", "VMEM MiB", "counted", "copies", "seconds"]

LLAMA_8B = Shape(64, 512, page_size=128, kv_heads=8, group=4, head_dim=128, dtype="bfloat16")
# Sizes of models, and what the table leaves out: (shape, layers, devices).
STEPS = [
    (LLAMA_8B, 2, 1),
    (LLAMA_8B, 2, 2),
    (dataclasses.replace(LLAMA_8B, chunk=0, rows=256, page_size=16), 2, 1),
    (dataclasses.replace(LLAMA_8B, kv_heads=1, page_size=16, chunk=2048), 1, 1),  # a million pages
    (Shape(16, 64, page_size=16, kv_heads=3, group=3, head_dim=64, dtype="bfloat16"), 2, 1),
    (Shape(8, 1, page_size=1, kv_heads=2, group=1, head_dim=32, dtype="bfloat16"), 1, 1),
    (Shape(2, 16, page_size=1024, kv_heads=8, group=1, head_dim=128, dtype="bfloat16"), 1, 1),
    (
        Shape(
            64,
            128,
            page_size=64,
            kv_heads=8,
            group=8,
            head_dim=64,
            dtype="bfloat16",
            options=Options(window=128, sinks=True),
        ),
        2,
        2,
    ),
]


def main(names: Sequence[str]) -> int:
    """Compiles for the chips that are named, each in a process of its own; the exit status."""
    if os.environ.get("JAX_PLATFORMS") == "cpu" and "TPU_SKIP_MDS_QUERY" in os.environ:
        return compile_all(names[0])
    status = 0
    for name in names:
        with TemporaryDirectory() as scratch:
            environment = aot_environment.environment(
                smallest_slice(name), Path(scratch), os.environ
            )
            command = [sys.executable, "-m", __spec__.name, name]
            status |= subprocess.run(command, env=environment, check=False).returncode
    return status


def smallest_slice(name: str) -> Devices:
    """The smallest slice of a chip that has several devices."""
    chip = CHIPS[name]
    return Devices(chip=chip, count=min(count for count in chip.counts if count > 2))


def compile_all(chip: str) -> int:
    """Compiles everything for one chip; the exit status."""
    devices = aot_devices(smallest_slice(chip))
    steps = [*STEPS, *((shape, 1, 1) for shape in table("bfloat16"))]
    rows: list[list[str]] = []
    faults: list[str] = []
    for done, (shape, layers, count) in enumerate(steps):
        print(f"{chip}: {done} of {len(steps)} steps", end="\r", file=sys.stderr)
        shape = dataclasses.replace(shape, max_len=MAX_LEN)
        try:
            for cells, fault in compile_kernels(shape, devices[:count], layers):
                rows.append([*cells[:2], chip, *cells[2:]])
                faults += [f"FAULT {' '.join(cells)}: {fault}"] if fault else []
        except Exception as error:  # one table with all that is wrong
            faults.append(f"FAULT {chip} {shape}: {type(error).__name__} {error}")
    print(format_table(HEADER, rows))
    print(f"{chip}: {len(rows)} kernels of {len(steps)} steps, {len(faults)} faults")
    print(*faults, sep="\n")
    return 1 if faults else 0


def compile_kernels(
    shape: Shape, devices: list[jax.Device], layers: int
) -> Iterator[tuple[list[str], str]]:
    """A row of the table for each kernel of a step, and what is wrong with it.

    Raises:
      Exception: It does not compile.
    """
    backend, kv = TpuBackend(), shape.attention_shape(len(devices)).kv
    num_pages = POOL_BYTES // layers // backend.bytes_per_page(kv)
    step = compile_step(backend, shape, devices, num_pages=num_pages, layers=layers)
    heads = HeadLayout(kv.kv_heads, kv.head_dim)
    counted = {
        name: vmem_bytes(
            choose_blocking(heads, shape.group, shape.page_size, tokens), heads, shape.group
        )
        for name, tokens in [("decode_attention", 1), ("prefill_attention", max(shape.chunk, 2))]
    } | {"write_kv": 0}
    kernels = scoped_memory(step.text)
    wanted = set(counted) if shape.chunk else {"write_kv", "decode_attention"}
    if set(kernels) != wanted:
        raise ValueError(f"kernels {sorted(kernels)}, not {sorted(wanted)}")
    for name, used in kernels.items():
        fault = " ".join(step.copies)
        if used > min(VMEM_LIMIT_BYTES, MOST_OVER_COUNT * counted[name]):
            fault += f" {used} bytes of VMEM, {counted[name]} were counted"
        cells = [
            name,
            f"{shape} layers{layers} devices{len(devices)}",
            f"{used / 2**20:.1f}",
            f"{counted[name] / 2**20:.1f}",
            str(len(step.copies)),
            f"{step.seconds:.1f}",
        ]
        yield cells, fault


def scoped_memory(text: str) -> dict[str, int]:
    """Bytes of VMEM that each kernel of a compiled program takes, by its name."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        name = re.search(r"(write_kv|decode_attention|prefill_attention)", line)
        used = re.search(r'"used_scoped_memory_configs":\[\{[^\]]*?"size":"(\d+)"', line)
        assert name, line[:300]
        assert used, line[:300]
        found[name[1]] = max(found.get(name[1], 0), int(used[1]))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

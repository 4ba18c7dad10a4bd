"""Compiles the GPU kernels for a chip that is not there, and prints what they take of it.

    python -m tests.pallas_kernels.compile_gpu h100

One step of attention for each shape of the table, over page tables for 32k tokens and pages of more
than 2^33 elements; and some of two layers over two devices. The real compilers, down to ptxas, from
the extra `plan-gpu`. Fails where a kernel with heads of up to 128 spills, where one takes more
shared memory than planned, or far less, where a step copies its cache, and where a shape of the
table is refused.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from octavo.configs.chips import parse_chips
from octavo.engine import aot_environment, plan_ptxas
from octavo.engine.aot_devices import aot_devices
from octavo.pallas_kernels import gpu_budget
from octavo.pallas_kernels.gpu_backend import GpuBackend, gpu_backend
from octavo.server.table import format_table

from . import gpu_launches
from .abstract_step import compile_step
from .attention_cases import Shape
from .attention_table import table

MAX_LEN = 32768
POOL_BYTES = 20 << 30  # of a layer: over a million of the table's smallest pages
HEADER = ["kernel", "shape", "for", "registers", "spills", "shared", "planned", "copies", "seconds"]
# ptxas counts a byte for the name of the place where the memory of a launch begins.
NAME_BYTES = 1
MOST_UNUSED = 2048  # bytes of shared memory that are planned and not taken: what alignment may cost

# Sizes of models.
MODELS = [
    Shape(64, 512, page_size=64, kv_heads=8, group=4, head_dim=128, dtype="bfloat16"),
    Shape(1, 64, page_size=16, kv_heads=1, group=8, head_dim=128, dtype="bfloat16"),
    Shape(16, 64, page_size=16, kv_heads=3, group=3, head_dim=64, dtype="bfloat16"),
]


def main(arguments: Sequence[str]) -> int:
    """Compiles for the chip that is named; the exit status.

    A process of its own does: the compilers are found by variables that JAX reads when it starts.
    """
    (devices,) = parse_chips(f"{arguments[0]}-2")
    if plan_ptxas.LOG_VARIABLE in os.environ:
        return compile_all(aot_devices(devices), Path(os.environ[plan_ptxas.LOG_VARIABLE]))
    with TemporaryDirectory() as scratch:
        environment = aot_environment.environment(devices, Path(scratch), os.environ)
        command = [sys.executable, "-m", __spec__.name, *arguments]
        return subprocess.run(command, env=environment, check=False).returncode


def compile_all(devices: list[jax.Device], logs: Path) -> int:
    """Compiles everything; the exit status."""
    backend = gpu_backend(devices[0])
    shapes = [
        dataclasses.replace(shape, max_len=MAX_LEN) for shape in [*MODELS, *table("bfloat16")]
    ]
    rows: list[list[str]] = []
    faults: list[str] = []
    for shape in shapes:
        for layers, some in [(1, devices[:1])] + [(2, devices)] * (shape.kv_heads == 8):
            try:
                found = compile_kernels(backend, shape, some, layers, logs)
            except Exception as error:  # one table with all that is wrong
                faults.append(f"{shape}: {type(error).__name__} {error}")
                continue
            rows += [cells for cells, _ in found]
            faults += [fault for _, fault in found if fault]
            print(f"{len(rows)} kernels", end="\r", file=sys.stderr)
    print(format_table(HEADER, rows))
    print(*faults, sep="\n")
    return 1 if faults else 0


def compile_kernels(
    backend: GpuBackend, shape: Shape, devices: list[jax.Device], layers: int, logs: Path
) -> list[tuple[list[str], str]]:
    """A row of the table for each kernel of a step, and what is wrong with it.

    Raises:
      Exception: It does not compile.
    """
    kv = shape.attention_shape(len(devices)).kv
    num_pages = POOL_BYTES // backend.bytes_per_page(kv)
    for log in logs.iterdir():
        log.unlink()
    step = compile_step(backend, shape, devices, num_pages=num_pages, layers=layers)
    copies = [*step.copies]
    memory = step.program.memory_analysis()
    assert memory is not None
    temporary_bytes = memory.temp_size_in_bytes
    if temporary_bytes > POOL_BYTES // 2:
        copies.append(f"{temporary_bytes} bytes of temporaries")
    width = gpu_budget.padded_head_dim(shape.head_dim)
    plans = {
        "octavo_prefill": gpu_budget.prefill_plan(backend.chip, width),
        "octavo_decode": gpu_budget.decode_plan(
            backend.chip,
            rows=shape.rows,
            kv_heads=kv.kv_heads,
            width=width,
            max_tokens=shape.columns * shape.page_size,
        ),
    }
    launched = gpu_launches.shared_bytes(step.lowered)
    found: list[tuple[list[str], str]] = []
    for kernel in plan_ptxas.kernels(log.read_text() for log in logs.iterdir()):
        for name, plan in plans.items():
            if name not in kernel.name:
                continue
            shared = launched[name] + max(kernel.shared_bytes - NAME_BYTES, 0)
            cells = [
                name,
                f"{shape} layers{layers}",
                kernel.architecture,
                str(kernel.registers),
                str(kernel.spill_bytes),
                str(shared),
                str(plan.shared_bytes),
                str(len(copies)),
                f"{step.seconds:.1f}",
            ]
            is_planned = 0 <= plan.shared_bytes - shared <= MOST_UNUSED
            is_wrong = copies or not is_planned or (kernel.spill_bytes and width <= 128)
            found.append((cells, f"FAULT {' '.join(cells)} {copies}" if is_wrong else ""))
    wanted = 1 + (shape.chunk > 0)
    if len(found) != wanted:
        raise ValueError(f"{len(found)} kernels were assembled, not {wanted}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

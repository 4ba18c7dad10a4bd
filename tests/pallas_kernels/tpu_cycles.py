"""Counts what the TPU kernels execute per block of keys, without a chip: static VLIW bundles.

    python -m tests.pallas_kernels.tpu_cycles v6e v5e tpu7x

Prints a table for the shape of Llama 3.1 8B. A bundle is one cycle
where nothing stalls: waits for DMA, for memory banks and for results of the matrix unit are not in
it, so it bounds the compute part from below, and compares one version of a kernel with another.

The compiler writes its final program out as text (libtpu's own flags); a loop's body begins at a
bundle marked LB and goes on while bundles are as deep. Blocks that every query sees whole skip the
masks: each kind is compiled alone.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import pytest

from octavo.engine import aot_environment
from octavo.engine.aot_devices import aot_devices
from octavo.pallas_kernels import tpu_attention
from octavo.pallas_kernels.tpu_backend import TpuBackend
from octavo.pallas_kernels.tpu_budget import choose_blocking
from octavo.pallas_kernels.tpu_cache import HeadLayout
from octavo.server.table import format_table

from .abstract_step import compile_step
from .attention_cases import Shape
from .compile_tpu import smallest_slice

KINDS = ("whole", "masked")
HEADER = ["chip", "kernel", "block", "keys", "queries", "bundles", "spills"]
LLAMA_8B = Shape(
    64, 256, page_size=128, kv_heads=8, group=4, head_dim=128, dtype="bfloat16", max_len=4096
)
_NUM_PAGES = 4096
_DUMP = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=final.*"
)
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(LB|LH|LE|PB|PF|CT)?\s*:\s*(>*)\s*\{(.*)")


@dataclass(frozen=True)
class Loop:
    """A loop of a final program.

    Attributes:
      bundles: Of its body, loops inside included.
      matrix_ops: Instructions of the matrix unit among them.
      spills: Values that are stored or loaded because registers ran out.
    """

    bundles: int
    matrix_ops: int
    spills: int


def loops(program: str) -> list[Loop]:
    """The loops of a program in which the matrix unit works, outermost first."""
    body: list[tuple[str, int, str]] = []
    for line in program.splitlines():
        if not (found := _BUNDLE.match(line)):
            continue
        depth = len(found[2])
        if found[3].startswith("}") and depth == 0 and body:
            depth = body[-1][1]  # the delay slots of a branch do not say how deep they are
        body.append((found[1] or "", depth, found[3]))
    counted: list[Loop] = []
    for first, (marker, depth, _) in enumerate(body):
        if marker != "LB":
            continue
        end = first + 1
        while end < len(body) and body[end][1] >= depth:
            if body[end][0] == "LB" and body[end][1] == depth:
                break
            end += 1
        text = " ".join(bundle for _, _, bundle in body[first:end])
        matrix_ops = len(re.findall(r"vmatmul|vmatprep|vmatpush", text))
        if matrix_ops:
            counted.append(Loop(end - first, matrix_ops, len(re.findall(r"spill", text))))
    return counted


def main(names: Sequence[str]) -> int:
    """Prints the table; the exit status. Each program is compiled in a process of its own."""
    if "LIBTPU_INIT_ARGS" in os.environ:
        _compile(*names)
        return 0
    rows: list[list[str]] = []
    for chip in names:
        for kind in KINDS:
            rows += _rows(chip, kind)
    print(format_table(HEADER, rows))
    return 0


def _rows(chip: str, kind: str) -> list[list[str]]:
    with TemporaryDirectory() as scratch:
        environment = aot_environment.environment(smallest_slice(chip), Path(scratch), os.environ)
        environment["LIBTPU_INIT_ARGS"] = _DUMP.format(folder=scratch)
        command = [sys.executable, "-m", __spec__.name, chip, kind]
        subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
        found: list[list[str]] = []
        for name, tokens in (("decode_attention", 1), ("prefill_attention", LLAMA_8B.chunk)):
            (file,) = Path(scratch).glob(f"*{name}*-03-final_bundles.txt")
            innermost = loops(file.read_text())[-1]
            heads = HeadLayout(LLAMA_8B.kv_heads, LLAMA_8B.head_dim)
            blocking = choose_blocking(heads, LLAMA_8B.group, LLAMA_8B.page_size, tokens)
            sizes = (blocking.block, blocking.tile, innermost.bundles, innermost.spills)
            found.append([chip, name, kind, *map(str, sizes)])
    return found


def _answer(*, is_whole: bool) -> Callable[..., jax.Array]:
    def answer(self: object, *place: object) -> jax.Array:
        return jnp.bool_(is_whole)

    return answer


def _compile(chip: str, kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu_attention._Kernel, "_is_whole", _answer(is_whole=kind == "whole"))
        devices = aot_devices(smallest_slice(chip))[:1]
        compile_step(TpuBackend(), LLAMA_8B, devices, num_pages=_NUM_PAGES, layers=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

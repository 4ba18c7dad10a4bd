"""Registers and spills, read from what ptxas says; and the script that stands in for it.

Breaks when a spill is overlooked, or when the script changes what a compiler gets to see.
"""

import subprocess
from pathlib import Path

from octavo.engine.plan_ptxas import LOG_VARIABLE, REAL_VARIABLE, SCRIPT, Kernel, kernels

# As ptxas of CUDA 13 prints it.
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'mha' for 'sm_90a'
ptxas info    : Function properties for mha
    24 bytes stack frame, 1964 bytes spill stores, 1784 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 24 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 12.3 ms
ptxas info    : Compiling entry function 'loop_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers
"""
MHA = Kernel(
    name="mha", architecture="sm_90a", registers=168, spill_bytes=1964 + 1784, shared_bytes=1024
)
FUSION = Kernel(
    name="loop_fusion", architecture="sm_90a", registers=16, spill_bytes=0, shared_bytes=0
)


def test_every_kernel_once() -> None:
    assert kernels([LOG, "", LOG]) == (FUSION, MHA)


def test_what_was_not_assembled_is_no_kernel() -> None:
    failed = LOG.partition("ptxas info    : Used 168")[0] + "ptxas fatal   : (C7600) no\n"
    assert kernels([failed, "nvcc: NVIDIA (R) Cuda compiler driver\n"]) == ()


def test_the_script_is_like_the_real_one(tmp_path: Path) -> None:
    """XLA reads the output, the error and the exit code; a path may hold spaces."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    real, script = folder / "real", folder / "ptxas"
    real.write_text('#!/bin/sh\necho "$@"\necho said >&2\nexit 3\n')
    script.write_text(SCRIPT)
    for file in (real, script):
        file.chmod(0o755)
    variables = {REAL_VARIABLE: str(real), LOG_VARIABLE: str(folder), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [script, "in put.ptx", "-o", "out"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "-v in put.ptx -o out\n", "said\n")
    kept = [file for file in folder.iterdir() if file not in (real, script)]
    assert [file.read_text() for file in kept] == ["said\n"]

"""What ptxas says of the kernels that it assembles: registers, spills, shared memory. No JAX.

XLA and Mosaic GPU run ptxas for every kernel. A shell script in its place runs the real one with -v
and keeps what it says. Source of the format: `ptxas --help`, CUDA 13.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

LOG_VARIABLE = "OCTAVO_PTXAS_LOG"
"""Folder that gets a file of what ptxas said for each run."""
REAL_VARIABLE = "OCTAVO_PTXAS"
"""Path of the real ptxas."""

# XLA asks for the version first, without an input; what it then says is not a kernel's.
SCRIPT = f"""\
#!/bin/sh
# Runs the real ptxas, and keeps what -v tells about each kernel.
log=$(mktemp "${{{LOG_VARIABLE}:?}}/XXXXXXXX")
"${{{REAL_VARIABLE}:?}}" -v "$@" 2>"$log"
code=$?
cat "$log" >&2
exit $code
"""

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, kw_only=True, order=True)
class Kernel:
    """What one kernel takes of a GPU.

    Attributes:
      name: Of its entry function.
      architecture: It was assembled for, such as "sm_90a".
      registers: Per thread.
      spill_bytes: Stored to and loaded from local memory, per thread, because registers ran out.
      shared_bytes: Shared memory of fixed size, per block; what a launch asks for is not in it.
    """

    name: str
    architecture: str
    registers: int
    spill_bytes: int
    shared_bytes: int


def kernels(logs: Iterable[str]) -> tuple[Kernel, ...]:
    """Every kernel once, by name; the same one is often assembled again.

    Args:
      logs: What each run of `ptxas -v` said.
    """
    return tuple(sorted({kernel for log in logs for kernel in _of_one_run(log)}))


def _of_one_run(log: str) -> list[Kernel]:
    found: list[Kernel] = []
    # A function's figures follow its name; device functions that it calls have spills of their own.
    entries = list(_ENTRY.finditer(log))
    for entry, following in zip_longest(entries, entries[1:]):
        said = log[entry.end() : following.start() if following else len(log)]
        used = _USED.search(said)
        shared = _SHARED.search(said)
        if used is None:  # it failed, and the error says so
            continue
        found.append(
            Kernel(
                name=entry[1],
                architecture=entry[2],
                registers=int(used[1]),
                spill_bytes=sum(int(a) + int(b) for a, b in _SPILLS.findall(said)),
                shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return found

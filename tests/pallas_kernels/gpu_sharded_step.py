"""Two devices that share the heads of a step, against one, in the interpreter: the same bits.

    python -m tests.pallas_kernels.gpu_sharded_step

Without races: over several devices the interpreter finds some that are none.
"""

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from octavo.pallas_kernels.gpu_backend import GpuBackend

from .abstract_step import HEADS, abstract_step
from .attention_cases import Options, Shape, bits, make_case
from .attention_steps import step_arguments
from .gpu_subject import GPU, H100


def main() -> int:
    """Whether two devices give what one gives; the exit status."""
    options = Options(window=45, sinks=True)
    shape = Shape(2, 16, 16, kv_heads=2, group=2, head_dim=64, dtype="bfloat16", options=options)
    case = make_case(shape, [100, 5], [(20, 7), (0, 3)])
    values = step_arguments(GPU, case, layers=2)
    results: list[np.ndarray] = []
    backend = GpuBackend(H100, interpret="yes")
    for count in (1, 2):
        mesh = Mesh(jax.devices()[:count], HEADS)
        step, arguments = abstract_step(backend, shape, shape.num_pages, 2, mesh)
        placed = jax.tree.map(_place, values, arguments)
        kv, attended = jax.jit(step)(*placed)
        results.append(bits(np.concatenate([np.asarray(x).ravel() for x in (attended, *kv)])))
    one, two = results
    np.testing.assert_array_equal(two, one)
    return 0


def _place(value: jax.Array | np.ndarray, described: Any) -> jax.Array:
    return jax.device_put(value, described.sharding)


if __name__ == "__main__":
    sys.exit(main())

"""The GPU backend in Pallas' interpreter, as a subject of the attention cases.

The interpreter runs Hopper's path: copies, barriers and their races as they are, memory that nobody
wrote as NaN, accesses out of bounds as errors. What it cannot run: `mma`, which is given a product
here; and cp.async with its waits (compute capability 8.0), which are only compiled.
"""

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from octavo.pallas_kernels.gpu_backend import GpuBackend
from octavo.pallas_kernels.gpu_budget import GpuChip

from . import gpu_pages
from .attention_steps import Subject

reset_interpreter = gpu_callbacks.reset_gpu_interpret_mode_state  # after a kernel that failed


def _mma(accumulator: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    return accumulator + jnp.dot(left, right, preferred_element_type=jnp.float32)


mlir.register_lowering(primitives.mma_p, mlir.lower_fun(_mma, False), platform="cpu")
primitives.mma_p.def_impl(_mma)


def _assert_nothing(token: jax.Array) -> jax.Array:
    return token


# A device that is done asserts that no device has a barrier; of several, the others still do.
gpu_callbacks.call_assert_no_barriers_allocated = _assert_nothing

H100 = GpuChip(compute_capability=90, num_sms=132)


GPU = Subject(GpuBackend(H100, interpret="races"), gpu_pages.pack, gpu_pages.unpack)

"""The GPU backend in Pallas' interpreter, as a subject of the attention cases.

The interpreter runs Hopper's path: copies, barriers and their races as they are, memory that nobody
wrote as NaN, accesses out of bounds as errors. What it cannot run: `mma`, which is given a product
here; and cp.async with its waits (compute capability 8.0), which are only compiled.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from octavo.pallas_kernels.backend import KVLayer
from octavo.pallas_kernels.gpu_backend import GpuBackend
from octavo.pallas_kernels.gpu_budget import Chip, padded_head_dim

from .attention_cases import Subject

reset_interpreter = gpu_callbacks.reset_gpu_interpret_mode_state  # after a kernel that failed


def _mma(accumulator: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    return accumulator + jnp.dot(left, right, preferred_element_type=jnp.float32)


mlir.register_lowering(primitives.mma_p, mlir.lower_fun(_mma, False), platform="cpu")
primitives.mma_p.def_impl(_mma)


def _assert_nothing(token: jax.Array) -> jax.Array:
    return token


# A device that is done asserts that no device has a barrier; of several, the others still do.
gpu_callbacks.call_assert_no_barriers_allocated = _assert_nothing

H100 = Chip(compute_capability=90, num_sms=132)


def _pack(k_pages: np.ndarray, v_pages: np.ndarray) -> KVLayer:
    *places, kv_heads, head_dim = k_pages.shape
    sides = np.stack([k_pages, v_pages], axis=3).reshape(*places, 2 * kv_heads, head_dim)
    padding = padded_head_dim(head_dim) - head_dim
    # Padding is zero where a token was written, and like the rest of its place where none was.
    filler = np.where(np.isnan(sides[..., :1]), sides[..., :1], np.zeros((), sides.dtype))
    return jnp.asarray(np.concatenate([sides, np.repeat(filler, padding, axis=-1)], axis=-1))


def _unpack(layer: KVLayer, kv_heads: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    sides = np.asarray(layer)[..., :head_dim]
    return sides[..., 0::2, :].copy(), sides[..., 1::2, :].copy()


GPU = Subject(GpuBackend(H100, interpret="races"), _pack, _unpack)

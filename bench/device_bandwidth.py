"""What the device can do at most: copies and products, measured. Part "device" of device_check."""

import jax
import jax.numpy as jnp
from jax import lax

from .device_parts import Findings, Tasks
from .device_timing import per_call


def tasks(is_dry_run: bool) -> Tasks:
    """Who the device is, then its two ceilings."""
    return {
        "device": describe,
        "copy": lambda: copy(2**20 if is_dry_run else 2**31),
        "matmul": lambda: matmul(256 if is_dry_run else 8192),
    }


def describe() -> Findings:
    """Name and memory of the device; null where it does not say."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    return {
        "num_devices": jax.device_count(),
        "memory_limit_bytes": stats.get("bytes_limit"),
        "compute_capability": getattr(device, "compute_capability", None),
        "core_count": getattr(device, "core_count", None),
    }


def copy(num_bytes: int) -> Findings:
    """Bandwidth of reading and writing one large array, bytes of both counted."""

    def call(_: jax.Array, array: jax.Array) -> jax.Array:
        return array + 1  # a plain copy would be left out

    def loop(count: int, array: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, call, array)

    array = jnp.arange(num_bytes // 4, dtype=jnp.int32)
    return per_call(loop, 20, array, donated=(0,)) | {"bytes": 2 * num_bytes}


def matmul(size: int) -> Findings:
    """Flops of a square product in bfloat16, on random numbers: zeros would run faster."""

    def loop(count: int, left: jax.Array, right: jax.Array) -> jax.Array:
        def call(_: jax.Array, left: jax.Array) -> jax.Array:
            return left @ right

        return lax.fori_loop(0, count, call, left)

    left, right = (
        jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) * size**-0.5
        for seed in range(2)
    )
    return per_call(loop, 20, left, right) | {"flops": 2 * size**3}

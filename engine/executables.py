"""The closed table of executables: everything that will ever run, compiled before READY.

A step is looked up by its StepKey. A missing key is an error, never a compilation.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax

from ..models.decoder import Decoder
from .device_state import DeviceState
from .packing import UploadLayout
from .step_functions import run_step
from .step_shapes import StepKey

# Called with (decoder leaves..., state leaves..., packed); returns (result, state leaves...).
Executable = Callable[..., Sequence[jax.Array]]

# On the CPU, LLVM's level 1 compiles a sixth faster than the default, 2, and the steps run alike:
# their time goes into library matmuls, and XLA's own loops are vectorised at level 1 too.
COMPILER_OPTIONS = {"cpu": {"xla_backend_optimization_level": 1}}


class ExecutableTable:
    """Compiled steps by key."""

    def __init__(self, executables: dict[StepKey, Executable]) -> None:
        """Takes what compile_steps made."""
        self._executables = executables

    def __getitem__(self, key: StepKey) -> Executable:
        """The executable of a key.

        Raises:
          KeyError: It was not compiled; the message lists what was.
        """
        try:
            return self._executables[key]
        except KeyError:
            raise KeyError(f"{key} is not among the compiled {sorted(self._executables)}") from None

    def __len__(self) -> int:
        """How many executables there are."""
        return len(self._executables)


def compile_steps(
    layouts: Sequence[UploadLayout],
    decoder: Decoder,
    state: DeviceState,
    packed_sharding: jax.sharding.Sharding,
    on_compiled: Callable[[int, int], None],
) -> ExecutableTable:
    """Compiles a step for each layout, side by side, through the persistent compilation cache.

    Args:
      layouts: One per executable.
      decoder: The model; only its shapes and shardings are looked at.
      state: Device state, likewise.
      packed_sharding: Where the upload lies.
      on_compiled: Called with (compiled so far, all) before the first and after each.
    """

    def compile_one(layout: UploadLayout) -> Executable:
        return compile_step(layout, decoder, state, packed_sharding)

    executables: dict[StepKey, Executable] = {}
    on_compiled(0, len(layouts))
    pool = ThreadPoolExecutor(min(len(layouts), os.cpu_count() or 1))
    try:
        pending = {pool.submit(compile_one, layout): layout.key for layout in layouts}
        for future in as_completed(pending):
            executables[pending[future]] = future.result()
            on_compiled(len(executables), len(layouts))
    finally:
        # After an error or Ctrl-C, what is queued is not compiled, and nobody waits for what is
        # under way and cannot be stopped.
        pool.shutdown(wait=False, cancel_futures=True)
    return ExecutableTable(executables)


def compile_step(
    layout: UploadLayout,
    decoder: Decoder,
    state: DeviceState,
    packed_sharding: jax.sharding.Sharding,
) -> jax.stages.Compiled:
    """Compiles one step; arguments as in compile_steps."""
    # Leaves travel flat: walking module and state trees would cost more than the dispatch.
    leaves, tree = jax.tree.flatten((decoder, state))
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
    num_parameters = len(jax.tree.leaves(decoder))
    state_shardings = [spec.sharding for spec in specs[num_parameters:]]
    packed = jax.ShapeDtypeStruct((layout.size,), "int32", sharding=packed_sharding)
    step = jax.jit(
        partial(_flat_step, layout, tree),
        donate_argnums=range(num_parameters, len(leaves)),
        out_shardings=(packed_sharding, *state_shardings),
    )
    platform = next(iter(packed_sharding.device_set)).platform
    return step.lower(*specs, packed).compile(COMPILER_OPTIONS.get(platform))


def _flat_step(layout: UploadLayout, tree: Any, *arguments: jax.Array) -> tuple[jax.Array, ...]:
    *leaves, packed = arguments
    decoder, state = jax.tree.unflatten(tree, leaves)
    state, result = run_step(layout, decoder, state, packed)
    return result, *jax.tree.leaves(state)

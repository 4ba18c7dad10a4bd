"""The closed table of executables: everything that will ever run, compiled before READY.

A step is looked up by its StepKey, a transfer of pages by its TransferKey. A missing key is an
error, never a compilation.

Every executable is the same program on each device of the mesh (shard_map): how arguments are
sharded says what share of them a device sees. One device is a mesh of one, not another path.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..models.dealing import MODEL_AXIS
from ..models.decoder import Decoder
from ..pallas_kernels.backend import AttentionBackend
from .device_state import DeviceState
from .packing import UploadLayout
from .page_transfer import PAGES_PER_TRANSFER, TransferKey, export_pages, import_pages, page_spec
from .step_functions import run_step
from .step_shapes import StepKey

Key = StepKey | TransferKey

# Called with flat arguments. A step: (decoder leaves..., state leaves..., packed, mask rows) to
# (result, state leaves...). EXPORT: (kv leaves..., pages) to (contents...). IMPORT: (kv leaves...,
# pages, contents...) to (kv leaves...). A content lies in host memory: of each device its part.
Executable = Callable[..., Sequence[jax.Array]]

# On the CPU, LLVM's level 1 compiles a sixth faster than the default, 2, and the steps run alike:
# their time goes into library matmuls, and XLA's own loops are vectorised at level 1 too.
COMPILER_OPTIONS = {"cpu": {"xla_backend_optimization_level": 1}}


class ExecutableTable:
    """Compiled executables by key."""

    def __init__(self, executables: Mapping[Key, Executable]) -> None:
        """Takes what compile_table made."""
        self._executables = executables

    def __getitem__(self, key: Key) -> Executable:
        """The executable of a key.

        Raises:
          KeyError: It was not compiled; the message lists what was.
        """
        try:
            return self._executables[key]
        except KeyError:
            compiled = sorted(map(str, self._executables))
            raise KeyError(f"{key} is not among the compiled {compiled}") from None

    def __contains__(self, key: Key) -> bool:
        """Whether a key was compiled."""
        return key in self._executables

    def __len__(self) -> int:
        """How many executables there are."""
        return len(self._executables)

    def program_texts(self) -> list[str]:
        """The optimised programs, in no particular order."""
        texts: list[str] = []
        for executable in self._executables.values():
            assert isinstance(executable, jax.stages.Compiled)
            text = executable.as_text()
            assert text is not None, "this backend does not tell its programs"
            texts.append(text)
        return texts


def compile_table(
    layouts: Sequence[UploadLayout],
    backend: AttentionBackend,
    decoder: Decoder,
    state: DeviceState,
    packed_sharding: NamedSharding,
    on_compiled: Callable[[int, int], None],
    *,
    with_transfers: bool,
) -> ExecutableTable:
    """Compiles everything, side by side, through the persistent compilation cache.

    Args:
      layouts: One per step.
      backend: What attends.
      decoder: The model; only its shapes and shardings are looked at.
      state: Device state, likewise.
      packed_sharding: Where the upload lies.
      on_compiled: Called with (compiled so far, all) before the first and after each.
      with_transfers: Whether pages will move to host memory and back.
    """
    compilations: dict[Key, Callable[[], Executable]] = {
        layout.key: partial(compile_step, layout, backend, decoder, state, packed_sharding)
        for layout in layouts
    }
    if with_transfers:
        for key in TransferKey:
            compilations[key] = partial(compile_transfer, key, state.kv, packed_sharding)
    executables: dict[Key, Executable] = {}
    on_compiled(0, len(compilations))
    pool = ThreadPoolExecutor(min(len(compilations), os.cpu_count() or 1))
    try:
        pending = {pool.submit(compile_one): key for key, compile_one in compilations.items()}
        for future in as_completed(pending):
            executables[pending[future]] = future.result()
            on_compiled(len(executables), len(compilations))
    finally:
        # After an error or Ctrl-C, what is queued is not compiled, and nobody waits for what is
        # under way and cannot be stopped.
        pool.shutdown(wait=False, cancel_futures=True)
    return ExecutableTable(executables)


def compile_step(
    layout: UploadLayout,
    backend: AttentionBackend,
    decoder: Decoder,
    state: DeviceState,
    packed_sharding: NamedSharding,
) -> jax.stages.Compiled:
    """Compiles one step; arguments as in compile_table."""
    # Leaves travel flat: walking module and state trees would cost more than the dispatch.
    leaves, tree = jax.tree.flatten((decoder, state))
    specs = _specs(leaves)
    num_parameters = len(jax.tree.leaves(decoder))
    packed = jax.ShapeDtypeStruct((layout.size,), "int32", sharding=packed_sharding)
    mask_rows = jax.ShapeDtypeStruct(layout.masks_shape, "int32", sharding=packed_sharding)
    state_shardings = [spec.sharding for spec in specs[num_parameters:]]
    traced = _trace_on_each_device(
        partial(_flat_step, layout, backend, tree),
        [*specs, packed, mask_rows],
        (packed_sharding, *state_shardings),
        donate_argnums=range(num_parameters, len(leaves)),
    )
    return _compile(traced, packed_sharding)


def _flat_step(
    layout: UploadLayout, backend: AttentionBackend, tree: Any, *arguments: jax.Array
) -> tuple[jax.Array, ...]:
    *leaves, packed, mask_rows = arguments
    decoder, state = jax.tree.unflatten(tree, leaves)
    state, result = run_step(layout, backend, decoder, state, packed, mask_rows)
    return result, *jax.tree.leaves(state)


def compile_transfer(
    key: TransferKey, kv: Any, packed_sharding: NamedSharding
) -> jax.stages.Compiled:
    """Compiles the moving of pages; arguments as in compile_table."""
    trace = {TransferKey.EXPORT: trace_export, TransferKey.IMPORT: trace_import}[key]
    return _compile(trace(kv, packed_sharding), packed_sharding)


def trace_export(kv: Any, packed_sharding: NamedSharding) -> jax.stages.Traced:
    """The reading of pages to host memory; arguments as in compile_table."""
    return _trace_on_each_device(
        _flat_export,
        [*_specs(jax.tree.leaves(kv)), _pages_spec(packed_sharding)],
        (_on_host(packed_sharding),) * PAGES_PER_TRANSFER,
    )


def trace_import(kv: Any, packed_sharding: NamedSharding) -> jax.stages.Traced:
    """The writing of pages from host memory; arguments as in compile_table."""
    specs = _specs(jax.tree.leaves(kv))
    page = page_spec(kv)
    content = jax.ShapeDtypeStruct(page.shape, page.dtype, sharding=_on_host(packed_sharding))
    return _trace_on_each_device(
        partial(_flat_import, len(specs)),
        [*specs, _pages_spec(packed_sharding), *[content] * PAGES_PER_TRANSFER],
        tuple(spec.sharding for spec in specs),
        donate_argnums=range(len(specs)),
    )


def _flat_export(*arguments: jax.Array) -> tuple[jax.Array, ...]:
    *kv, pages = arguments
    return export_pages(kv, pages)


def _flat_import(num_leaves: int, *arguments: jax.Array) -> tuple[jax.Array, ...]:
    kv, pages, contents = arguments[:num_leaves], arguments[num_leaves], arguments[num_leaves + 1 :]
    return tuple(import_pages(list(kv), pages, contents))


def _trace_on_each_device(
    function: Callable[..., tuple[jax.Array, ...]],
    arguments: Sequence[jax.ShapeDtypeStruct],
    out_shardings: tuple[NamedSharding, ...],
    donate_argnums: Sequence[int] = (),
) -> jax.stages.Traced:
    """Traces what every device runs on its own share of the arguments.

    Arguments in host memory are brought to the devices first.
    """
    in_shardings = [argument.sharding for argument in arguments]
    shared = jax.shard_map(
        function,
        mesh=out_shardings[0].mesh,
        in_specs=tuple(sharding.spec for sharding in in_shardings),
        out_specs=tuple(sharding.spec for sharding in out_shardings),
        check_vma=False,  # it cannot see into kernels
    )

    def run(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        return shared(*map(_to_device, arguments, in_shardings))

    jitted = jax.jit(run, donate_argnums=donate_argnums, out_shardings=out_shardings)
    return jitted.trace(*arguments)


def _to_device(argument: jax.Array, sharding: NamedSharding) -> jax.Array:
    if sharding.memory_kind != "pinned_host":
        return argument
    return jax.device_put(argument, sharding.with_memory_kind("device"))


def _compile(traced: jax.stages.Traced, packed_sharding: NamedSharding) -> jax.stages.Compiled:
    platform = next(iter(packed_sharding.device_set)).platform
    return traced.lower().compile(COMPILER_OPTIONS.get(platform))


def _specs(arrays: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays]


def _pages_spec(packed_sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((PAGES_PER_TRANSFER,), "int32", sharding=packed_sharding)


def _on_host(packed_sharding: NamedSharding) -> NamedSharding:
    """Host memory that a device reads and writes by itself; of a page, each has its own part."""
    spec = PartitionSpec(MODEL_AXIS)
    return NamedSharding(packed_sharding.mesh, spec, memory_kind="pinned_host")

"""From an open checkpoint to an engine that is ready: parameters, pages, executables.

The one place where the engine's parts are put together.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import psutil

from ..configs.engine_config import EngineConfig
from ..models.checkpoint import Checkpoint
from ..models.decoder import Decoder, ParameterSpec, declared_parameters, decoder_from_parameters
from ..pallas_kernels import paged_attention
from . import kv_budget, packing
from .admission import EngineLimits
from .device_state import DeviceState, empty_slots
from .engine import Engine
from .executables import compile_steps
from .executor import Executor
from .packing import UploadLayout
from .placement import make_mesh, parameter_sharding, replicated
from .request import Schedule
from .step_shapes import StepShapes

OnProgress = Callable[[str, int, int], None]
"""Told (stage, done, total): "loading" and "compiling", done from 0 to total."""


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and what is worth saying about how it was built.

    Attributes:
      engine: Ready: nothing it will do compiles any more.
      device: Platform it runs on: cpu, gpu or tpu.
      num_executables: Compiled step shapes.
      compile_s: Seconds that compiling (or loading from the persistent cache) took.
    """

    engine: Engine
    device: str
    num_executables: int
    compile_s: float


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    eos_token_ids: frozenset[int],
    clock: Callable[[], float],
    on_progress: OnProgress,
) -> BuiltEngine:
    """Loads the parameters, allocates the pages, compiles every step shape and runs each once.

    Args:
      checkpoint: The model.
      config: Sizes; what it leaves open is measured here.
      eos_token_ids: Ids that end an output, from the checkpoint and its tokenizer together.
      clock: The engine's clock.
      on_progress: Told how far it is.

    Raises:
      ValueError: The config asks for more than the model or the memory allow.
      CheckpointError: The checkpoint is damaged or does not fit its own description.
    """
    model = checkpoint.config
    mesh = make_mesh(jax.local_devices()[:1])
    device = mesh.devices.flat[0]

    on_progress("loading", 0, 1)
    decoder = _load_decoder(checkpoint, config, mesh)
    on_progress("loading", 1, 1)

    kv_shape = (model.num_kv_heads, model.head_dim, config.dtype)
    bytes_per_page = paged_attention.bytes_per_page(model.num_layers, config.page_size, *kv_shape)
    pages = kv_budget.num_pages(
        config, model, bytes_per_page=bytes_per_page, free_bytes=_free_bytes(device)
    )
    limits = EngineLimits.resolve(
        config, model, num_pages=pages, eos_token_ids=sorted(eos_token_ids)
    )
    pages_per_seq = -(-limits.max_model_len // config.page_size)
    everywhere = replicated(mesh)
    state = jax.jit(
        lambda: DeviceState(
            paged_attention.allocate(model.num_layers, pages, config.page_size, *kv_shape),
            empty_slots(config.max_num_seqs, pages_per_seq, config.max_stop_ids),
        ),
        out_shardings=everywhere,
    )()

    layouts = [
        UploadLayout(key, config.max_num_seqs, config.page_size, config.max_stop_ids)
        for key in StepShapes.from_config(config).all_keys()
    ]
    started_s = time.perf_counter()
    table = compile_steps(layouts, decoder, state, everywhere, partial(on_progress, "compiling"))
    compile_s = time.perf_counter() - started_s
    executor = Executor(table, decoder, state, everywhere)
    # The first run of an executable touches memory and code for the first time; no request waits
    # for that. A step of nothing but padding changes nothing.
    nothing = Schedule(decodes=(), chunks=(), page_entries=())
    for layout in layouts:
        executor.fetch(executor.dispatch(layout.key, packing.pack(nothing, layout)))
    return BuiltEngine(
        engine=Engine(config, limits, executor, clock),
        device=device.platform,
        num_executables=len(table),
        compile_s=compile_s,
    )


def _load_decoder(checkpoint: Checkpoint, config: EngineConfig, mesh: jax.sharding.Mesh) -> Decoder:
    declared = declared_parameters(checkpoint.config, config.dtype)

    def sharding_of(spec: ParameterSpec) -> jax.sharding.Sharding:
        return parameter_sharding(mesh, spec.axes)

    parameters = checkpoint.load(declared, sharding_of)
    return decoder_from_parameters(checkpoint.config, config.dtype, parameters)


def _free_bytes(device: jax.Device) -> int:
    """Memory that a KV pool may take: what the device has left, or on the host a share of it."""
    stats = device.memory_stats()
    if stats is None:  # the CPU backend keeps no account
        return psutil.virtual_memory().available // kv_budget.HOST_SHARE
    return stats["bytes_limit"] - stats["bytes_in_use"]

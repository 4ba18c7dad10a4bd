"""From an open checkpoint to an engine that is ready: parameters, pages, executables.

The one place where the engine's parts are put together.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import psutil

from ..configs.engine_config import EngineConfig
from ..models.base_tokenizer import Tokenizer
from ..models.checkpoint_format import Checkpoint
from ..pallas_kernels.backend import AttentionBackend
from ..pallas_kernels.choice import Choice, choose
from . import kv_budget, packing
from .admission import EngineLimits
from .engine import Engine
from .event_log import Recorder
from .executables import compile_step, compile_table, compile_transfer
from .executor import DeviceExecutor
from .fingerprint import fingerprint
from .guided_masks import GuideCompiler
from .initial_state import StateMaker, attention_shape, bytes_per_device, load_decoder
from .measure import measure_costs
from .page_transfer import TransferKey
from .placement import make_mesh, replicated
from .self_check import check_determinism
from .step_costs import StepCosts

logger = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""Told (stage, done, total): "loading" and "compiling", done from 0 to total."""


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and what is worth saying about how it was built.

    Attributes:
      engine: Ready: nothing it will do compiles any more.
      device: Platform it runs on: cpu, gpu or tpu.
      num_executables: Compiled step shapes, and the two transfers of pages where there are any.
      compile_s: Seconds that compiling (or loading from the persistent cache) took.
      costs: What its steps take, measured on this device.
      attention: Name of the backend that attends.
      attention_reason: Why it is not the platform's kernels; empty where it is, or there are none.
      fingerprint: Of a deterministic engine; equal ones promise equal tokens for a request that is
        greedy or brings a seed. Else empty.
    """

    engine: Engine
    device: str
    num_executables: int
    compile_s: float
    costs: StepCosts
    attention: str
    attention_reason: str = ""
    fingerprint: str = ""


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    eos_token_ids: frozenset[int],
    clock: Callable[[], float],
    on_progress: OnProgress,
    tokenizer: Tokenizer | None = None,
    guides: GuideCompiler | None = None,
    recorder: Recorder | None = None,
    backend: AttentionBackend | None = None,
) -> BuiltEngine:
    """Loads the parameters, allocates the pages, compiles every step shape and measures it.

    Args:
      checkpoint: The model.
      config: Sizes; what it leaves open is measured here.
      eos_token_ids: Ids that end an output, from the checkpoint and its tokenizer together.
      clock: The engine's clock.
      on_progress: Told how far it is.
      tokenizer: The model's, for the fingerprint; None: nothing but ids comes and goes.
      guides: Makes guides for structured output; None: who asks for one fails.
      recorder: Told what the scheduler is told and decides.
      backend: What attends. None: chosen by platform and shape.

    Raises:
      ValueError: The config asks for more than the model or the memory allow, or for determinism
        that this device does not have.
      CheckpointError: The checkpoint is damaged or does not fit its own description.
    """
    model = checkpoint.config
    mesh = make_mesh(_devices(config))
    device = mesh.devices.flat[0]
    choice = (
        choose(config.attention, device, attention_shape(config, model))
        if backend is None
        else Choice(backend)
    )
    backend = choice.backend
    if choice.reason:
        logger.warning("attention runs in plain JAX: %s", choice.reason)

    # What the config cannot have is refused before minutes of loading.
    maker = StateMaker(config, model, backend, mesh)
    num_host_pages = kv_budget.host_pages(config, maker.bytes_per_page)

    on_progress("loading", 0, 1)
    decoder = load_decoder(checkpoint, config, mesh)
    on_progress("loading", 1, 1)

    everywhere = replicated(mesh)
    layouts = packing.upload_layouts(config, model.vocab_size)

    def free_bytes() -> int:
        parameter_bytes = bytes_per_device(decoder)
        limit_bytes = config.device_memory_bytes
        if limit_bytes is None:
            stats = device.memory_stats()
            if stats is None:  # the CPU backend keeps no account, and shares the machine
                return kv_budget.host_pool_bytes(
                    psutil.virtual_memory().available, config.tensor_parallel_size
                )
            limit_bytes, parameter_bytes = stats["bytes_limit"], stats["bytes_in_use"]
        # The number of pages is part of the shapes that are compiled, so what a step takes besides
        # is measured with a pool of the least size.
        probe = maker.describe(kv_budget.LEAST_PAGES, kv_budget.longest_context(config, model))
        step = _memory_of(compile_step(layouts[0], backend, decoder, probe, everywhere))
        transfers = [
            _memory_of(compile_transfer(key, probe.kv, everywhere))
            for key in TransferKey
            if num_host_pages > 0
        ]
        grown = kv_budget.grown
        return kv_budget.pool_bytes(
            limit_bytes,
            parameter_bytes=parameter_bytes,
            slot_bytes=bytes_per_device((probe.slots, probe.tables)),
            temporary_bytes=grown(max(each.temp_size_in_bytes for each in (step, *transfers))),
            program_bytes=len(layouts) * grown(step.generated_code_size_in_bytes)
            + sum(grown(each.generated_code_size_in_bytes) for each in transfers),
        )

    pages = kv_budget.num_pages(
        config, model, bytes_per_page=maker.bytes_per_page, free_bytes=free_bytes
    )
    limits = EngineLimits.resolve(
        config, model, num_pages=pages, eos_token_ids=sorted(eos_token_ids)
    )
    state = maker.make(pages, limits.max_model_len)

    started_s = time.perf_counter()
    table = compile_table(
        layouts,
        backend,
        decoder,
        state,
        everywhere,
        partial(on_progress, "compiling"),
        with_transfers=num_host_pages > 0,
    )
    compile_s = time.perf_counter() - started_s
    executor = DeviceExecutor(table, decoder, state, everywhere, layouts)
    # No request waits for the first run of an executable, which touches its memory and code.
    pages_per_seq = state.slots.page_table.shape[1]
    costs = measure_costs(
        executor, layouts, num_pages=pages, pages_per_seq=pages_per_seq, clock=clock
    )
    digest = ""
    if config.deterministic:
        check_determinism(
            executor,
            layouts[0],
            num_pages=pages,
            pages_per_seq=pages_per_seq,
            vocab_size=model.vocab_size,
        )
        parameters = jax.tree.leaves(decoder)
        programs = table.program_texts()
        digest = fingerprint(config, limits, parameters, programs, device, tokenizer)
    return BuiltEngine(
        engine=Engine(
            config,
            limits,
            executor,
            clock,
            costs,
            max_host_pages=num_host_pages,
            guides=guides,
            recorder=recorder,
        ),
        device=device.platform,
        num_executables=len(table),
        compile_s=compile_s,
        costs=costs,
        attention=backend.name,
        attention_reason=choice.reason,
        fingerprint=digest,
    )


def _devices(config: EngineConfig) -> list[jax.Device]:
    """Those that share the model; raises ValueError if there are too few."""
    devices, wanted = jax.local_devices(), config.tensor_parallel_size
    if wanted > len(devices):
        raise ValueError(
            f"tensor_parallel_size is {wanted}; it must be at most {len(devices)}: so many "
            f"{devices[0].platform} devices are there"
        )
    return devices[:wanted]


def _memory_of(step: jax.stages.Compiled) -> Any:
    """What a step takes, as memory_analysis names it."""
    analysis = step.memory_analysis()
    if analysis is None:
        raise ValueError("num_pages must be given: this device does not say what a step takes")
    return analysis

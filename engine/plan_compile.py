"""Compiles the real steps of an engine that is not there, and says what became of them.

Weights and state are described, not made: a compiler looks at nothing but shapes and shardings. The
memory is divided as engine.build divides it, so that the engine gets the pages that are planned.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import Mesh

from ..configs.engine_config import EngineConfig
from ..configs.model_config import ModelConfig
from ..models.decoder import Decoder
from ..pallas_kernels.backend import AttentionBackend
from ..pallas_kernels.choice import choose
from . import kv_budget, packing
from .admission import EngineLimits
from .device_state import DeviceState
from .executables import compile_step, compile_transfer
from .initial_state import StateMaker, attention_shape, bytes_per_device, describe_decoder
from .kv_budget import LEAST_PAGES, host_pages
from .packing import UploadLayout
from .page_transfer import TransferKey
from .placement import make_mesh, replicated
from .plan_hlo import cache_copies, collectives
from .plan_records import CompiledPlan, PlanJob, PlannedExecutable

OnStep = Callable[[int, int], None]
"""Told how many steps are compiled, and how many will be."""

_MAX_REASON = 600  # characters of what a compiler says


@dataclass(frozen=True)
class DescribedEngine:
    """An engine that is described and not there.

    Attributes:
      model: The model.
      config: The engine's sizes.
      mesh: Devices, which may be such that only compile.
      backend: What attends.
    """

    model: ModelConfig
    config: EngineConfig
    mesh: Mesh
    backend: AttentionBackend

    @cached_property
    def decoder(self) -> Decoder:
        """The model, with shapes and shardings in place of parameters."""
        return describe_decoder(self.model, self.config, self.mesh)

    @cached_property
    def layouts(self) -> list[UploadLayout]:
        """One per step, the costliest first."""
        return packing.upload_layouts(self.config, self.model.vocab_size)

    @property
    def maker(self) -> StateMaker:
        """Describes what steps change."""
        return StateMaker(self.config, self.model, self.backend, self.mesh)

    @cached_property
    def transfers(self) -> list[TransferKey]:
        """What moves pages to host memory and back, if there is any for them.

        Raises:
          ValueError: There is not enough for one page.
        """
        return list(TransferKey) if host_pages(self.config, self.maker.bytes_per_page) else []

    def compile(self, what: UploadLayout | TransferKey, state: DeviceState) -> jax.stages.Compiled:
        """Compiles a step or a transfer for the devices of the mesh."""
        everywhere = replicated(self.mesh)
        if isinstance(what, TransferKey):
            return compile_transfer(what, state.kv, everywhere)
        # Kernels are traced for the default device's architecture.
        with jax.default_device(self.mesh.devices.flat[0]):
            return compile_step(what, self.backend, self.decoder, state, everywhere)

    def at_depth(self, num_layers: int) -> "DescribedEngine":
        """The same with fewer layers."""
        model = dataclasses.replace(self.model, num_layers=num_layers)
        return dataclasses.replace(self, model=model)


def compile_plan(job: PlanJob, devices: list[jax.Device], on_step: OnStep) -> CompiledPlan:
    """Divides the memory, then compiles the steps.

    Args:
      job: What is planned.
      devices: As many as the job names.
      on_step: Told how far it is.

    Raises:
      ValueError: What attends was chosen by name, and is not for these devices or this model,
        max_model_len is more than the model was trained for, or host_kv_bytes less than a page.
    """
    choice = choose(job.config.attention, devices[0], attention_shape(job.config, job.model))
    engine = DescribedEngine(job.model, job.config, make_mesh(devices), choice.backend)
    longest = kv_budget.longest_context(job.config, job.model)
    probe = engine.maker.describe(LEAST_PAGES, longest)
    plan = CompiledPlan(
        attention=choice.backend.name,
        attention_reason=choice.reason,
        parameter_bytes=bytes_per_device(engine.decoder),
        slot_bytes=bytes_per_device((probe.slots, probe.tables)),
        page_bytes=engine.maker.bytes_per_page,
        max_model_len=longest,
        num_executables=len(engine.layouts) + len(engine.transfers),
    )
    missing = _missing_bytes(job, plan, LEAST_PAGES)
    if missing > 0:  # a compiler would say no more, or less clearly
        return dataclasses.replace(plan, reason=_does_not_fit(missing), missing_bytes=missing)

    layouts = engine.layouts if job.compiles_all else corner_layouts(engine.layouts)
    total = len(layouts) + len(engine.transfers) + 1
    on_step(0, total)
    try:
        # The number of pages is part of what is compiled, and depends on what it takes.
        plan = _with_pages(
            job,
            plan,
            [
                _compile(engine, job, what, LEAST_PAGES, longest)
                for what in (engine.layouts[0], *engine.transfers)
            ],
        )
        on_step(1, total)
        if plan.num_pages is None:
            return plan
        found: list[PlannedExecutable] = []
        for what in (*layouts, *engine.transfers):
            each = _compile(engine, job, what, plan.num_pages, plan.max_model_len)
            if each.cache_copies:  # or other arrays as large by chance, which do not grow
                larger = _compile(engine, job, what, plan.num_pages + 1, plan.max_model_len)
                each = dataclasses.replace(each, cache_copies=larger.cache_copies)
            found.append(each)
            on_step(len(found) + 1, total)
    # Compilers raise what they like: whatever it is, it is the answer to what was asked.
    except Exception as error:
        return dataclasses.replace(
            plan, reason=f"does not compile: {_one_line(error)}", failed=True
        )
    return _judged(job, dataclasses.replace(plan, executables=tuple(found)))


def corner_layouts(layouts: list[UploadLayout]) -> list[UploadLayout]:
    """The largest mixed step, and the largest and smallest decode step where there are such."""
    decode = [layout for layout in layouts if layout.key.chunk == 0]
    return [layouts[0], *dict.fromkeys([*decode[:1], *decode[-1:]])]


def _compile(
    engine: DescribedEngine,
    job: PlanJob,
    what: UploadLayout | TransferKey,
    num_pages: int,
    max_model_len: int,
) -> PlannedExecutable:
    """A step or a transfer, extrapolated where the model is too deep."""

    def at(engine: DescribedEngine) -> PlannedExecutable:
        started_s = time.perf_counter()
        state = engine.maker.describe(num_pages, max_model_len)
        compiled = engine.compile(what, state)
        compile_s = time.perf_counter() - started_s
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None
        assert text is not None
        told = PlannedExecutable(
            compile_s=compile_s,
            temporary_bytes=memory.temp_size_in_bytes,
            program_bytes=memory.generated_code_size_in_bytes,
            collectives=collectives(text),
            cache_copies=cache_copies(text, _leaf_sizes(state)),
        )
        if isinstance(what, TransferKey):
            return dataclasses.replace(told, kind=what.value)
        return dataclasses.replace(told, rows=what.key.rows, chunk=what.key.chunk)

    if not job.is_extrapolated:
        return at(engine)
    return extrapolate(at(engine.at_depth(1)), at(engine.at_depth(2)), engine.model.num_layers)


def extrapolate(
    one: PlannedExecutable, two: PlannedExecutable, num_layers: int
) -> PlannedExecutable:
    """An executable of many layers from those of one and two: each more adds what the second added.

    Copies of the cache are not extrapolated: any is too many.
    """

    def more(first: int, second: int) -> int:
        return max(second, first + (num_layers - 1) * (second - first))

    counts = [{(each.kind, each.bytes): each for each in found.collectives} for found in (one, two)]
    found = [
        dataclasses.replace(
            each, count=more(counts[0][key].count if key in counts[0] else 0, each.count)
        )
        for key, each in counts[1].items()
    ]
    return dataclasses.replace(
        two,
        compile_s=one.compile_s + two.compile_s,
        temporary_bytes=more(one.temporary_bytes, two.temporary_bytes),
        program_bytes=more(one.program_bytes, two.program_bytes),
        collectives=tuple(found),
    )


def _with_pages(
    job: PlanJob, plan: CompiledPlan, largest: Sequence[PlannedExecutable]
) -> CompiledPlan:
    """The plan with its pages, or with the reason why there are none.

    Args:
      job: What is planned.
      plan: Sizes of all that does not depend on a compiler.
      largest: The step that takes most memory and all transfers, compiled with the least pool.
    """
    config, model = job.config, job.model
    grown = [
        dataclasses.replace(
            each,
            temporary_bytes=kv_budget.grown(each.temporary_bytes),
            program_bytes=kv_budget.grown(each.program_bytes),
        )
        for each in largest
    ]
    measured = dataclasses.replace(plan, executables=tuple(grown))
    try:
        pages = kv_budget.num_pages(
            config,
            model,
            bytes_per_page=plan.page_bytes,
            free_bytes=lambda: (
                _host_pool_bytes(job, plan) if job.is_on_host else _left_bytes(job, measured)
            ),
        )
        limits = EngineLimits.resolve(config, model, num_pages=pages, eos_token_ids=())
    except ValueError as error:
        missing = _missing_bytes(job, measured, LEAST_PAGES)
        reason = _does_not_fit(missing) if missing > 0 else str(error)
        return dataclasses.replace(plan, reason=reason, missing_bytes=max(missing, 0))
    return dataclasses.replace(plan, num_pages=pages, max_model_len=limits.max_model_len)


def _judged(job: PlanJob, plan: CompiledPlan) -> CompiledPlan:
    """The plan with the reason against it, if its executables give one."""
    assert plan.num_pages is not None
    for each in plan.executables:
        if each.cache_copies:
            copies = f"{len(each.cache_copies)} copies of a layer's KV pages"
            return dataclasses.replace(plan, reason=f"{copies} in {each}: {each.cache_copies[0]}")
    missing = _missing_bytes(job, plan, plan.num_pages)
    if missing > 0:
        return dataclasses.replace(plan, reason=_does_not_fit(missing), missing_bytes=missing)
    return plan


def _left_bytes(job: PlanJob, plan: CompiledPlan) -> int:
    """What is left for the pages beside what the plan's executables take."""
    return kv_budget.pool_bytes(
        job.limit_bytes,
        parameter_bytes=plan.parameter_bytes,
        slot_bytes=plan.slot_bytes,
        temporary_bytes=plan.temporary_bytes,
        program_bytes=plan.program_bytes,
    )


def _host_pool_bytes(job: PlanJob, plan: CompiledPlan) -> int:
    """What the pool of one device takes of the host's memory, once the weights are loaded."""
    weights = plan.parameter_bytes * job.devices.count
    return kv_budget.host_pool_bytes(max(job.host_free_bytes - weights, 0), job.devices.count)


def _missing_bytes(job: PlanJob, plan: CompiledPlan, num_pages: int) -> int:
    """What a device lacks for so many pages and all the rest; negative: what it has left."""
    return num_pages * plan.page_bytes - _left_bytes(job, plan)


def _does_not_fit(missing_bytes: int) -> str:
    lacks = f"{-(-missing_bytes // 2**20)} MiB"
    if missing_bytes >= 2**30:
        lacks = f"{missing_bytes / 2**30:.2f} GiB"
    return f"does not fit: each device lacks {lacks}"


def _leaf_sizes(state: DeviceState) -> set[int]:
    """Elements of the arrays of pages, on one device."""
    return {math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state.kv)}


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON]

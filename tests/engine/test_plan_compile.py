"""Which steps are compiled, and what is said of a model that is too deep to be compiled whole.

Breaks when an extrapolation is less than what it stands for, or when the largest step is left out.
Annotations are not checked where shapes stand in for arrays.
"""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from octavo.configs.chips import parse_chips
from octavo.configs.engine_config import EngineConfig
from octavo.engine import packing, plan_compile
from octavo.engine.kv_budget import LEAST_PAGES
from octavo.engine.packing import UploadLayout
from octavo.engine.page_transfer import TransferKey
from octavo.engine.plan_compile import compile_plan, corner_layouts, extrapolate
from octavo.engine.plan_hlo import Collective
from octavo.engine.plan_records import CompiledPlan, PlanJob, PlannedExecutable
from octavo.engine.step_shapes import StepKey
from octavo.models.decoder import Decoder
from tests.models.tiny_checkpoints import tiny_config

STEP = PlannedExecutable(
    rows=8,
    chunk=16,
    compile_s=1.0,
    temporary_bytes=100,
    program_bytes=1000,
    collectives=(
        Collective(kind="all-gather", bytes=64, count=1),
        Collective(kind="all-reduce", bytes=32, count=3),
    ),
    cache_copies=(),
)


def test_corners() -> None:
    layouts = packing.upload_layouts(EngineConfig(), 1000)
    keys = [layout.key for layout in corner_layouts(layouts)]
    assert keys == [StepKey(32, 256), StepKey(32, 0), StepKey(2, 0)]


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (EngineConfig(max_num_seqs=1, prefill_chunk_tokens=2), [StepKey(2, 2), StepKey(2, 0)]),
        (EngineConfig(deterministic=True), [StepKey(32, 256)]),
    ],
)
def test_corners_that_fall_together_are_compiled_once(
    config: EngineConfig, keys: list[StepKey]
) -> None:
    layouts = packing.upload_layouts(config, 1000)
    assert [layout.key for layout in corner_layouts(layouts)] == keys


def test_each_more_layer_adds_what_the_second_added() -> None:
    two = dataclasses.replace(
        STEP,
        compile_s=1.5,
        temporary_bytes=110,
        program_bytes=1600,
        collectives=(
            Collective(kind="all-gather", bytes=64, count=1),
            Collective(kind="all-reduce", bytes=32, count=5),
            Collective(kind="reduce-scatter", bytes=8, count=1),
        ),
        cache_copies=("copy bf16[2]{0}",),
    )
    assert extrapolate(STEP, two, 80) == dataclasses.replace(
        two,
        compile_s=2.5,
        temporary_bytes=100 + 79 * 10,
        program_bytes=1000 + 79 * 600,
        collectives=(
            Collective(kind="all-gather", bytes=64, count=1),
            Collective(kind="all-reduce", bytes=32, count=161),
            Collective(kind="reduce-scatter", bytes=8, count=79),
        ),
    )


def test_less_of_something_in_the_second_layer_is_no_less_of_all() -> None:
    """Compilers reuse memory: two layers may take less than one, and 80 must not take none."""
    two = dataclasses.replace(STEP, temporary_bytes=90, program_bytes=900)
    deep = extrapolate(STEP, two, 80)
    assert (deep.temporary_bytes, deep.program_bytes) == (90, 900)


def job(**changes: int) -> PlanJob:
    (devices,) = parse_chips("cpu-1")
    return PlanJob(
        model=tiny_config(num_layers=6),
        config=EngineConfig(
            dtype="float32", deterministic=True, max_num_seqs=2, prefill_chunk_tokens=16, **changes
        ),
        devices=devices,
        host_bytes=1 << 32,
        host_free_bytes=1 << 32,
        compiles_all=False,
        max_layers=2,
    )


def ignore_step(done: int, total: int) -> None:
    """Nobody waits."""


class FakeCompiled:
    """Takes more with every layer, as a compiler would say."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers

    def memory_analysis(self) -> SimpleNamespace:
        return SimpleNamespace(
            temp_size_in_bytes=1000 + 16 * self._num_layers, generated_code_size_in_bytes=0
        )

    def as_text(self) -> str:
        return "  %r = f32[8]{0} all-reduce(%x)\n" * (2 * self._num_layers + 1)


def two_plans(device_memory_bytes: int) -> tuple[CompiledPlan, CompiledPlan]:
    """Of a model of six layers: from two of them, and whole."""
    deep = job(device_memory_bytes=device_memory_bytes)
    whole = dataclasses.replace(deep, max_layers=6)
    devices = jax.devices()[:1]
    return compile_plan(deep, devices, ignore_step), compile_plan(whole, devices, ignore_step)


@pytest.mark.usefixtures("types_unchecked")
def test_a_deep_model_is_planned_from_two_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, slots and pages are those of all layers, and what a compiler says grows evenly."""

    def compile_step(layout: object, backend: object, decoder: Decoder, *_: object) -> FakeCompiled:
        return FakeCompiled(len(decoder.layers))

    monkeypatch.setattr(plan_compile, "compile_step", compile_step)
    deep, whole = two_plans(900_000)
    assert whole.num_pages == 17  # what is left holds fewer than the 33 that slots could use
    assert whole.executables[0].collectives == (Collective(kind="all-reduce", bytes=32, count=13),)
    steps = tuple(dataclasses.replace(step, compile_s=0) for step in whole.executables)
    again = tuple(dataclasses.replace(step, compile_s=0) for step in deep.executables)
    assert dataclasses.replace(deep, executables=again) == dataclasses.replace(
        whole, executables=steps
    )


@pytest.mark.full
@pytest.mark.usefixtures("types_unchecked")
def test_a_real_compiler_takes_alike_for_every_layer() -> None:
    """What the compiler of this machine says of six layers is near what two of them let expect."""
    deep, whole = two_plans(1 << 30)
    (step,), (exact,) = deep.executables, whole.executables
    assert step.temporary_bytes == pytest.approx(exact.temporary_bytes, rel=0.25)


@pytest.mark.usefixtures("types_unchecked")
def test_what_a_compiler_says_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED:\n  out of memory")

    monkeypatch.setattr(plan_compile, "compile_step", fail)
    plan = compile_plan(job(), jax.devices()[:1], ignore_step)
    assert plan.reason == "does not compile: RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert plan.failed


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_memory_bytes": 10_000}, "does not fit: each device lacks "),
        ({"kv_cache_bytes": 10}, "kv_cache_bytes is 10, which gives 0 pages of "),
        ({"max_model_len": 200, "num_pages": 3}, "max_model_len is 200; it must be at most 33"),
    ],
)
def test_what_cannot_be_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], reason: str
) -> None:
    def measured(*_: object) -> PlannedExecutable:
        return STEP

    monkeypatch.setattr(plan_compile, "_compile", measured)
    plan = compile_plan(job(**changes), jax.devices()[:1], ignore_step)
    assert plan.reason.startswith(reason)
    assert (plan.missing_bytes > 0) == ("lacks" in reason)
    assert plan.num_pages is None
    assert not plan.failed


@pytest.mark.usefixtures("types_unchecked")
def test_what_moves_pages_is_compiled_where_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporaries leave less for the pages, and it must not copy the pool either."""

    def compiled(_: object, __: object, what: object, *___: object) -> PlannedExecutable:
        if not isinstance(what, TransferKey):
            return STEP
        copies = ("copy f32[33,16,16]",) if what is TransferKey.IMPORT else ()
        return dataclasses.replace(
            STEP, kind=what.value, rows=0, chunk=0, temporary_bytes=50_000, cache_copies=copies
        )

    monkeypatch.setattr(plan_compile, "_compile", compiled)
    stays, moves = (
        compile_plan(
            job(device_memory_bytes=900_000, host_kv_bytes=host_kv_bytes),
            jax.devices()[:1],
            ignore_step,
        )
        for host_kv_bytes in (0, 1_000_000)
    )
    assert [each.kind for each in stays.executables] == ["step"]
    assert [each.kind for each in moves.executables] == ["step", "export", "import"]
    assert (stays.num_executables, moves.num_executables) == (1, 3)
    assert stays.num_pages is not None
    assert moves.num_pages is not None
    assert moves.num_pages < stays.num_pages
    assert stays.reason == ""
    assert moves.reason == (
        "1 copies of a layer's KV pages in the import of pages: copy f32[33,16,16]"
    )


@pytest.mark.usefixtures("types_unchecked")
def test_on_the_host_the_pool_is_a_share_of_what_weights_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(*_: object) -> PlannedExecutable:
        return STEP

    monkeypatch.setattr(plan_compile, "_compile", measured)

    def plan(host_free_bytes: int) -> CompiledPlan:
        asked = dataclasses.replace(job(), host_free_bytes=host_free_bytes)
        return compile_plan(asked, jax.devices()[:1], ignore_step)

    sizes = plan(1 << 32)
    pages = [plan(sizes.parameter_bytes + left).num_pages for left in (-1, 2**18, 2**19)]
    assert pages == [None, 2**16 // sizes.page_bytes, 2**17 // sizes.page_bytes]


@pytest.mark.usefixtures("types_unchecked")
def test_a_pool_that_the_host_does_not_have_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> PlannedExecutable:
        return STEP

    monkeypatch.setattr(plan_compile, "_compile", measured)
    plan = compile_plan(job(num_pages=2**20), jax.devices()[:1], ignore_step)
    assert plan.missing_bytes > 2**20 * plan.page_bytes - job().host_bytes
    assert plan.reason.startswith("does not fit: each device lacks ")


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(("grows", "reason"), [(True, "1 copies of a layer's"), (False, "")])
def test_an_array_as_large_as_the_pages_by_chance_is_no_copy_of_them(
    monkeypatch: pytest.MonkeyPatch, grows: bool, reason: str
) -> None:
    """Hidden states may have as many elements as a small pool."""

    def compiled(
        engine: object, job: object, layout: object, pages: int, _: int
    ) -> PlannedExecutable:
        found = pages == 17 or (grows and pages == 18)
        return dataclasses.replace(STEP, cache_copies=("copy f32[8]",) if found else ())

    monkeypatch.setattr(plan_compile, "_compile", compiled)
    plan = compile_plan(job(num_pages=17), jax.devices()[:1], ignore_step)
    assert plan.reason.startswith(reason)
    assert bool(plan.reason) == grows


def test_a_context_beyond_the_models_is_refused_before_anything_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(*_: object) -> PlannedExecutable:
        pytest.fail("it waited for a compiler")

    monkeypatch.setattr(plan_compile, "_compile", compiled)
    with pytest.raises(ValueError, match="max_model_len is 1000; it must be at most 256"):
        compile_plan(job(max_model_len=1000), jax.devices()[:1], ignore_step)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("part", ["temporary_bytes", "program_bytes"])
def test_what_grows_with_the_pool_still_fits(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Measured with the least pool; programs of the real one were 2 % larger on a TPU.

    Whatever little is left after the last whole page.
    """
    small = dataclasses.replace(STEP, **{part: 300_000})
    large = dataclasses.replace(STEP, **{part: 306_000})

    def measured(*arguments: object) -> PlannedExecutable:
        return small if LEAST_PAGES in arguments else large

    monkeypatch.setattr(plan_compile, "_compile", measured)
    found = set[int | None]()
    for device_memory_bytes in range(1_200_000, 1_220_000, 999):
        limited = job(device_memory_bytes=device_memory_bytes)
        plan = compile_plan(limited, jax.devices()[:1], ignore_step)
        assert plan.reason == ""
        found.add(plan.num_pages)
    assert len(found) > 1  # memory is what bounds them
    assert 33 not in found


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("compiles_all", [False, True])
def test_all_is_every_step(monkeypatch: pytest.MonkeyPatch, compiles_all: bool) -> None:
    """The first is compiled twice: with hardly any pages, to see how many there can be."""
    compiled: list[tuple[StepKey, int]] = []

    def measured(_: object, job: PlanJob, layout: UploadLayout, pages: int, *__: object) -> object:
        compiled.append((layout.key, pages))
        return STEP

    monkeypatch.setattr(plan_compile, "_compile", measured)
    asked = dataclasses.replace(
        job(), config=EngineConfig(dtype="float32"), compiles_all=compiles_all
    )
    layouts = packing.upload_layouts(asked.config, 1000)
    told: list[tuple[int, int]] = []

    def on_step(done: int, total: int) -> None:
        told.append((done, total))

    plan = compile_plan(asked, jax.devices()[:1], on_step)
    chosen = layouts if compiles_all else corner_layouts(layouts)
    keys = [layout.key for layout in chosen]
    assert plan.num_pages is not None
    assert compiled == [(keys[0], 2), *((key, plan.num_pages) for key in keys)]
    assert told == [(done, len(keys) + 1) for done in range(len(keys) + 2)]


@pytest.mark.usefixtures("types_unchecked")
def test_a_copy_of_the_cache_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> PlannedExecutable:
        return dataclasses.replace(STEP, cache_copies=("copy f32[33,16,16]", "transpose f32[8448]"))

    monkeypatch.setattr(plan_compile, "_compile", measured)
    plan = compile_plan(job(), jax.devices()[:1], ignore_step)
    assert plan.reason == (
        "2 copies of a layer's KV pages in the step of 8 rows and 16 prompt tokens: "
        "copy f32[33,16,16]"
    )


def test_attention_of_another_platform_is_refused() -> None:
    asked = dataclasses.replace(job(), config=EngineConfig(attention="tpu"))
    with pytest.raises(ValueError, match="attention is 'tpu'; it must be 'auto' or 'reference'"):
        compile_plan(asked, jax.devices()[:1], ignore_step)

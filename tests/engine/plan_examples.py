"""A job and an answer, for what does not care which."""

from octavo.configs.chips import parse_chips
from octavo.configs.engine_config import EngineConfig
from octavo.configs.presets import load_preset
from octavo.engine.plan_hlo import Collective
from octavo.engine.plan_ptxas import Kernel
from octavo.engine.plan_records import CompiledPlan, PlanJob, PlannedExecutable


def make_job(chips: str = "cpu-1") -> PlanJob:
    (devices,) = parse_chips(chips)
    model = load_preset("llama-3.2-1b").architecture
    assert model is not None
    return PlanJob(
        model=model,
        config=EngineConfig(tensor_parallel_size=devices.count),
        devices=devices,
        host_bytes=1 << 40,
        host_free_bytes=0,
        compiles_all=False,
        max_layers=32,
    )


PLAN = CompiledPlan(
    attention="reference",
    parameter_bytes=1,
    slot_bytes=2,
    page_bytes=3,
    num_pages=4,
    max_model_len=5,
    num_executables=6,
    executables=(
        PlannedExecutable(
            rows=1,
            chunk=0,
            compile_s=0.5,
            temporary_bytes=7,
            program_bytes=8,
            collectives=(Collective(kind="all-reduce", bytes=9, count=10),),
            cache_copies=("copy bf16[2]{0}",),
        ),
    ),
    kernels=(Kernel(name="k", architecture="sm_90a", registers=1, spill_bytes=2, shared_bytes=3),),
)

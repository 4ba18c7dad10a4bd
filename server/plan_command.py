"""`octavo plan`: what a model takes on chips that are not there, from their own compilers."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from absl import flags

from ..configs.chips import CHIPS, Devices, parse_chips
from ..configs.model_config import ModelConfig
from ..configs.presets import DEFAULT_PRESET, load_preset, preset_names
from ..engine.plan_cache import job_key, read_answer, write_answer
from ..engine.plan_figures import figures, no_answer
from ..engine.plan_processes import PlanFailed, run_jobs
from ..engine.plan_records import PlanJob
from ..models.checkpoint import CheckpointError, read_model_config
from ..models.fetch import FetchError, default_cache_dir, fetch
from .command_line import EXIT_FAILURE, Command, CommandError, UsageError
from .engine_flags import ALL_FIELDS, define_size_flags, engine_config
from .plan_report import report
from .progress import ProgressDisplay

# The number of devices is part of --chips, and nothing that is compiled depends on the seed.
_FIELDS = tuple(name for name in ALL_FIELDS if name not in ("tensor_parallel_size", "seed"))
_FREE_BYTES_STEP = 1 << 28  # a little more memory free than the last time is the same job
_MAX_LAYERS = 32  # of a deeper model, one and two layers are compiled


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `octavo plan`."""
    flags.DEFINE_string(
        "model",
        DEFAULT_PRESET,
        f"A preset ({', '.join(preset_names())}), a GGUF file, a Hugging Face config.json or "
        "folder, or a folder that `octavo convert` wrote. No weights are needed.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "chips",
        "cpu-1",
        f"What it shall run on: NAME-COUNT, and more after commas. Names: {', '.join(CHIPS)}. A "
        "count is of devices as JAX counts them; a tpu7x chip is two.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "all",
        False,
        "Compile every step; else the smallest and largest decode step and the largest mixed one.",
        flag_values=values,
    )
    flags.DEFINE_bool("fresh", False, "Compile again what was compiled before.", flag_values=values)
    flags.DEFINE_bool(
        "json",
        False,
        "Print one JSON object, in the last line, in place of tables.",
        flag_values=values,
    )
    define_size_flags(values, _FIELDS)


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Plans; returns 0 if the model can be served on all of the chips."""
    devices = parse_chips(values.chips)
    model = _model(values.model)
    jobs = [_job(values, model, each) for each in devices]
    answers = _answers(jobs, default_cache_dir() / "plan", is_fresh=values.fresh)
    chips = [answers[job] for job in jobs]
    if values.json:
        print(json.dumps({"model": values.model, "chips": chips}))
    else:
        print(report(values.model, chips))
    return 0 if all(chip["ok"] for chip in chips) else EXIT_FAILURE


def _job(values: flags.FlagValues, model: ModelConfig, devices: Devices) -> PlanJob:
    host_bytes = free_bytes = 0
    if devices.chip.memory_bytes is None:
        host = psutil.virtual_memory()
        host_bytes = host.total
        free_bytes = host.available // _FREE_BYTES_STEP * _FREE_BYTES_STEP
    return PlanJob(
        model=model,
        config=engine_config(values, _FIELDS, tensor_parallel_size=devices.count),
        devices=devices,
        host_bytes=host_bytes,
        host_free_bytes=free_bytes,
        compiles_all=values.all,
        max_layers=_MAX_LAYERS,
    )


def _answers(
    jobs: Sequence[PlanJob], folder: Path, *, is_fresh: bool
) -> dict[PlanJob, dict[str, Any]]:
    """The figures of each job, from the folder or from the compilers."""
    progress = ProgressDisplay(sys.stderr)
    keys = {job: job_key(job) for job in jobs}
    kept = {} if is_fresh else {job: read_answer(folder, keys[job]) for job in jobs}
    found = {job: figures(job, plan) for job, plan in kept.items() if plan is not None}

    def on_step(job: PlanJob, done: int, total: int) -> None:
        progress(f"{job.devices}: compiling", done, total)

    try:
        for job, plan in run_jobs([job for job in jobs if job not in found], on_step):
            if isinstance(plan, PlanFailed):
                found[job] = no_answer(job, str(plan))
            else:
                # A compiler's failure may be the machine's, and sources may be changed meanwhile.
                if not plan.failed and job_key(job) == keys[job]:
                    write_answer(folder, keys[job], plan)
                found[job] = figures(job, plan)
    finally:
        progress.close()
    return found


def _model(name: str) -> ModelConfig:
    """The architecture of what --model names."""
    try:
        if name not in preset_names():
            return read_model_config(_existing(name))
        preset = load_preset(name)
        return preset.architecture or read_model_config(fetch(name, default_cache_dir()))
    except (FetchError, CheckpointError) as error:
        raise CommandError(str(error)) from error


def _existing(name: str) -> Path:
    path = Path(name)
    if not name or not path.exists():
        raise UsageError(
            f"--model is {name!r}; it must be a preset ({', '.join(preset_names())}) or the path "
            "of a file or folder"
        )
    return path.parent if path.name == "config.json" else path


COMMAND = Command(
    name="plan",
    summary="Compiles the steps of a model with the compilers of chips that are not there, and "
    "prints what they take and what bounds their speed.",
    define_flags=define_flags,
    run=run,
)

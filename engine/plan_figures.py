"""The figures of one plan: memory, requests by context, bounds. Arithmetic only; no JAX.

They are plain values, as `octavo plan --json` prints them. Bytes are of one device.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from .plan_bounds import Bound, Costs, decode_bound, prefill_bound
from .plan_records import CompiledPlan, PlanJob
from .step_shapes import StepShapes

_CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
_PROMPTS = (128, 1024, 8192, 65_536)

BOUNDS_NOTE = (
    "lower bounds from bytes and flops at the makers' peaks; unmeasured, and never reached"
)


def no_answer(job: PlanJob, reason: str) -> dict[str, Any]:
    """The figures of a job that nothing could be told about."""
    return {"chip": str(job.devices), "ok": False, "reason": reason}


def figures(job: PlanJob, plan: CompiledPlan) -> dict[str, Any]:
    """Everything that is known of one job."""
    return {
        "chip": str(job.devices),
        "ok": not plan.reason,
        "reason": plan.reason,
        "devices": job.devices.count,
        "attention": plan.attention,
        "attention_reason": plan.attention_reason,
        "num_layers": job.model.num_layers,
        "compiled_layers": job.compiled_layers,
        "is_extrapolated": job.is_extrapolated,
        "memory": memory(job, plan),
        "page_size": job.config.page_size,
        "num_pages": plan.num_pages,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": job.config.max_num_seqs,
        "requests": list(requests_by_context(job, plan)),
        "num_executables": plan.num_executables,
        "executables": [dataclasses.asdict(each) for each in plan.executables],
        "kernels": [dataclasses.asdict(kernel) for kernel in plan.kernels],
        "bounds": BOUNDS_NOTE,
        "tpot_bounds": list(tpot_bounds(job, plan)),
        "ttft_bounds": list(ttft_bounds(job, plan)),
    }


def memory(job: PlanJob, plan: CompiledPlan) -> dict[str, Any]:
    """Where the memory of a device goes; None: not known."""
    return {
        "limit_bytes": job.limit_bytes,
        "parameter_bytes": plan.parameter_bytes,
        "slot_bytes": plan.slot_bytes,
        "page_bytes": plan.page_bytes,
        "kv_bytes": None if plan.num_pages is None else plan.num_pages * plan.page_bytes,
        "temporary_bytes": plan.temporary_bytes if plan.executables else None,
        "program_bytes": plan.program_bytes if plan.executables else None,
        "missing_bytes": plan.missing_bytes,
    }


def requests_by_context(job: PlanJob, plan: CompiledPlan) -> Iterator[dict[str, int]]:
    """How many requests the pages hold when each has so many tokens, prompt and output together.

    More than max_num_seqs never run at once, whatever the pages hold.
    """
    if plan.num_pages is None:
        return
    for tokens in _up_to(plan.max_model_len, _CONTEXTS):
        # The last token is sampled and never fed back, so it needs no place.
        pages_each = -(-(tokens - 1) // job.config.page_size)
        yield {"context_tokens": tokens, "requests": (plan.num_pages - 1) // pages_each}


def tpot_bounds(job: PlanJob, plan: CompiledPlan) -> Iterator[dict[str, Any]]:
    """The least time between two tokens, by rows and context; only what the pages hold."""
    shapes = StepShapes.from_config(job.config)
    rows_of_steps = shapes.decode_rows or (job.config.max_num_seqs,)
    for each in requests_by_context(job, plan):
        for rows in dict.fromkeys((1, *rows_of_steps)):
            if rows <= each["requests"]:
                context_tokens = each["context_tokens"]
                bound = decode_bound(_costs(job, plan), rows=rows, context_tokens=context_tokens)
                if bound is not None:
                    yield {"rows": rows, "context_tokens": context_tokens, **_milliseconds(bound)}


def ttft_bounds(job: PlanJob, plan: CompiledPlan) -> Iterator[dict[str, Any]]:
    """The least time to a first token of a prompt that is computed alone, by its length."""
    if plan.num_pages is None:
        return
    for prompt_tokens in _up_to(plan.max_model_len - 1, _PROMPTS):
        bound = prefill_bound(
            _costs(job, plan), prompt_tokens=prompt_tokens, chunk=job.config.prefill_chunk_tokens
        )
        if bound is not None:
            yield {"prompt_tokens": prompt_tokens, **_milliseconds(bound)}


def _costs(job: PlanJob, plan: CompiledPlan) -> Costs:
    return Costs(
        model=job.model,
        chip=job.devices.chip,
        num_devices=job.devices.count,
        page_size=job.config.page_size,
        page_bytes=plan.page_bytes,
        parameter_bytes=plan.parameter_bytes,
        weight_size={"bfloat16": 2, "float32": 4}[job.config.dtype],
    )


def _milliseconds(bound: Bound) -> dict[str, Any]:
    return {"at_least_ms": round(bound.seconds * 1e3, 4), "limited_by": bound.limited_by}


def _up_to(most: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes that are not too large, and the largest that is possible."""
    return tuple(dict.fromkeys((*(size for size in sizes if size < most), most)))

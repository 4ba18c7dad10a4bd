"""What every benchmark says about itself: which server, which load, how far rounds differ."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .load import Load, LoadOptions


def describe(load: Load, options: LoadOptions) -> dict[str, Any]:
    """What was asked of which server."""
    model = load.model
    return {
        "model": {
            name: getattr(model, name) for name in ("name", "dtype", "device", "max_num_seqs")
        },
        "workload": dataclasses.asdict(options.workload)
        | {"prompts": "random ids" if options.prompt_text is None else "cut from text"},
        "rounds": options.rounds,
        "requests_per_client": options.requests_per_client,
    }


def headline(load: Load, options: LoadOptions) -> str:
    """One line that says what was measured."""
    model, workload = load.model, options.workload
    return (
        f"octavo, {model.name}, {model.dtype} on {model.device}, {model.max_num_seqs} slots: "
        f"{workload.prompt_tokens} prompt and {workload.output_tokens} output tokens; sampled at "
        f"temperature {workload.temperature:g}, top_p {workload.top_p:g}; medians of "
        f"{options.rounds} rounds of {options.requests_per_client} requests a client"
    )


def spread(speeds: Sequence[float]) -> str:
    """The slowest and the fastest round."""
    return f"{min(speeds):.1f}-{max(speeds):.1f}"

"""A plan as a person reads it: a table of all chips, then what each compiler told."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ..engine.plan_figures import BOUNDS_NOTE
from .table import format_table

_HEADER = (
    "chip",
    "",
    "weights",
    "KV",
    "temporary",
    "programs",
    "memory",
    "pages",
    "longest",
    "requests",
    "TPOT >=",
    "TTFT >=",
)

_WIDTH = 100
_ONE_FLAVOUR = "penalties, bias, masks and log-probabilities are in each step"


def report(model: str, chips: Sequence[dict[str, Any]]) -> str:
    """All of it.

    Args:
      model: As the command line names it.
      chips: Figures of each chip, as engine.plan_figures makes them.
    """
    lines = [f"{model}: GiB are of one device", format_table(_HEADER, list(map(_row, chips)))]
    lines += [
        *_wrapped(
            "requests: how many fit at the longest context. TPOT: there, of the largest decode "
            "step that they fill. "
            f"TTFT: of the longest prompt, alone. TPOT and TTFT are {BOUNDS_NOTE}."
        ),
    ]
    for chip in chips:
        lines += ["", *(line for text in _details(chip) for line in _wrapped(text))]
    return "\n".join(lines)


def _row(chip: dict[str, Any]) -> tuple[str, ...]:
    memory = chip.get("memory", {})
    sizes = ("parameter_bytes", "kv_bytes", "temporary_bytes", "program_bytes", "limit_bytes")
    requests = chip.get("requests", [])
    tpot, ttft = chip.get("tpot_bounds", []), chip.get("ttft_bounds", [])
    return (
        chip["chip"],
        "ok" if chip["ok"] else "no",
        *(_gib(memory.get(name)) for name in sizes),
        _number(chip.get("num_pages")),
        _number(chip.get("max_model_len")),
        f"{requests[-1]['requests']} x {requests[-1]['context_tokens']}" if requests else "-",
        f"{tpot[-1]['at_least_ms']:.2f} ms" if tpot else "-",
        f"{ttft[-1]['at_least_ms']:.0f} ms" if ttft else "-",
    )


def _details(chip: dict[str, Any]) -> Iterator[str]:
    yield f"{chip['chip']}: {chip['reason'] or 'every step that was compiled fits'}"
    if "executables" not in chip:
        return
    executables = chip["executables"]
    if chip["is_extrapolated"] and executables:
        yield (
            f"  extrapolated: of {chip['num_layers']} layers one and two were compiled; weights "
            "and bounds are exact"
        )
    why = f", because {chip['attention_reason']}" if chip["attention_reason"] else ""
    yield f"  attention: {chip['attention']}{why}"
    yield f"  {len(executables)} of {chip['num_executables']} executables compiled; {_ONE_FLAVOUR}"
    header = ("", "rows", "chunk", "compile s", "temporary MiB", "program MiB", "cache copies")
    rows = [
        (
            each["kind"],
            *(str(each[name]) if each["kind"] == "step" else "-" for name in ("rows", "chunk")),
            f"{each['compile_s']:.1f}",
            _mib(each["temporary_bytes"]),
            _mib(each["program_bytes"]),
            str(len(each["cache_copies"])),
        )
        for each in executables
    ]
    if rows:
        yield _indented(format_table(header, rows))
    for step in executables:
        if step["collectives"]:
            each = ", ".join(
                f"{found['count']} {found['kind']} of {_mib(found['bytes'])} MiB"
                for found in step["collectives"]
            )
            yield f"  {step['rows']} rows, chunk {step['chunk']}: {each}"
    yield from _bounds("requests by context", chip["requests"], "context_tokens", "requests")
    yield from _tpot(chip["tpot_bounds"])
    yield from _bounds("TTFT at least, ms", chip["ttft_bounds"], "prompt_tokens", "at_least_ms")
    yield from _kernels(chip["kernels"])


def _tpot(bounds: Sequence[dict[str, Any]]) -> Iterator[str]:
    for rows in dict.fromkeys(bound["rows"] for bound in bounds):
        own = [bound for bound in bounds if bound["rows"] == rows]
        yield from _bounds(f"TPOT at least, ms, {rows} rows", own, "context_tokens", "at_least_ms")


def _bounds(what: str, values: Sequence[dict[str, Any]], by: str, name: str) -> Iterator[str]:
    if values:
        yield f"  {what}: " + ", ".join(f"{each[name]} at {each[by]}" for each in values)


def _kernels(kernels: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Octavo's own, and those of the compiler that spill; of the others how many there are."""
    if not kernels:
        return
    spilling = [kernel for kernel in kernels if kernel["spill_bytes"]]
    most = max(kernel["registers"] for kernel in kernels)
    yield f"  {len(kernels)} kernels, {len(spilling)} that spill, at most {most} registers"
    header = ("kernel", "registers", "spill bytes", "static shared bytes")
    names = ("name", "registers", "spill_bytes", "shared_bytes")
    shown = [each for each in kernels if each["name"].startswith("octavo") or each in spilling]
    if shown:
        yield _indented(
            format_table(header, [tuple(str(each[n]) for n in names) for each in shown])
        )


def _wrapped(text: str) -> list[str]:
    """Sentences in lines that a terminal shows whole; a table as it is."""
    if "\n" in text:
        return [text]
    return textwrap.wrap(text, _WIDTH, subsequent_indent="    ", break_long_words=False)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)

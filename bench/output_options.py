"""`python -m octavo.bench.output_options`: what a request's options cost it, and others beside it.

One engine with the default model in this process, driven step by step: no transport. Every kind of
batch runs once to warm up, and then they run in turn, round after round, so that a machine that
gets faster or slower does so for all. Timed are the steps in which all rows run, from the last
prompt to the first end: a batch's rate is its tokens over their time, a request's time between
tokens is that between the steps that brought them. With --deterministic a second engine takes part,
whose steps all run one executable.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from absl import flags

from ..configs.engine_config import EngineConfig
from ..configs.presets import DEFAULT_PRESET
from ..engine.admission import admit
from ..engine.build import build_engine
from ..engine.compilation import compile_events, use_persistent_cache
from ..engine.engine import Engine
from ..engine.guides import Guides
from ..engine.request import Request
from ..engine.sampling_params import Guide, GuideKind, SamplingParams
from ..models.checkpoint import open_checkpoint
from ..models.fetch import default_cache_dir, fetch
from ..models.tokenizer import load_tokenizer
from ..server.command_line import Command, UsageError
from ..server.table import format_table
from .entry_point import main

PROMPT_TOKENS = 32
MAX_ROWS = 32
DRAWN = {"temperature": 1.0, "top_p": 0.95}
# Lets every letter through for as long as anybody asks: its mask is never small, nor at its end.
LETTERS = Guide(kind=GuideKind.REGEX, text="[a-z ]{1,4000}")
RECORDS = Guide(
    kind=GuideKind.JSON_SCHEMA,
    text=json.dumps(
        {
            "type": "array",
            "minItems": 200,
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "integer", "minimum": 0, "maximum": 9999},
                    "name": {"type": "string", "maxLength": 12},
                    "kind": {"enum": ["lend", "return", "renew"]},
                },
                "required": ["id", "name", "kind"],
                "additionalProperties": False,
            },
        }
    ),
)
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
RULES = {
    **PENALTIES,
    "logit_bias": tuple((token_id, -1.0) for token_id in range(100, 200)),
    "banned_token_ids": tuple(range(1000, 1100)),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A batch: rows of one sort, and some of another beside them.

    Attributes:
      name: As the table has it.
      options: Of every row, as SamplingParams has them.
      others: Of those that are the other sort.
      num_others: How many of the rows those are.
    """

    name: str
    options: dict[str, Any]
    others: dict[str, Any] = field(default_factory=dict)
    num_others: int = 0


def kinds(rows: int) -> list[Kind]:
    """What is compared, at so many rows."""
    few = max(1, rows // 8)
    guided = {**DRAWN, "guide": RECORDS}
    return [
        Kind(name="greedy", options={"temperature": 0.0}),
        Kind(name="drawn", options=DRAWN),
        Kind(name="log-probabilities", options={**DRAWN, "logprobs": True}),
        Kind(
            name="top 5 log-probabilities", options={**DRAWN, "logprobs": True, "top_logprobs": 5}
        ),
        Kind(name="penalties", options={**DRAWN, **PENALTIES}),
        Kind(name="penalties, bias, bans", options={**DRAWN, **RULES}),
        Kind(name="guided by letters", options={**DRAWN, "guide": LETTERS}),
        Kind(name="guided by a schema", options=guided),
        Kind(name=f"{few} guided, rest drawn", options=DRAWN, others=guided, num_others=few),
        Kind(
            name=f"{few} with all rules, rest drawn",
            options=DRAWN,
            others={**DRAWN, **RULES},
            num_others=few,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One run of one batch.

    Attributes:
      tokens_per_s: Of all rows, while all run.
      gaps_s: Times between tokens of the rows of the first sort.
      other_gaps_s: Of the others.
    """

    tokens_per_s: float
    gaps_s: list[float]
    other_gaps_s: list[float]


def run_batch(
    engine: Engine, kind: Kind, rows: int, output_tokens: int, clock: Callable[[], float]
) -> Timing:
    """Runs a batch to its end.

    Raises:
      RuntimeError: A request did not bring all its tokens, or the rows never all ran at once.
    """
    vocab_size = engine.limits.vocab_size
    for number in range(rows):
        is_other = number < kind.num_others
        options = kind.others if is_other else kind.options
        guide = options.get("guide")
        request = Request(
            request_id=f"{'other' if is_other else 'row'}-{number}",
            prompt_token_ids=tuple(
                (number * 7919 + at * 104_729) % vocab_size for at in range(PROMPT_TOKENS)
            ),
            # A guide's output does not end before it must: min_tokens holds its end off.
            sampling=SamplingParams(
                max_tokens=output_tokens,
                min_tokens=output_tokens,
                ignore_eos=guide is None,
                seed=number,
                **options,
            ),
            arrival_s=clock(),
            reads_prefix_cache=False,
        )
        engine.add(admit(request, engine.config, engine.limits))
    last_s: dict[str, float] = {}
    gaps: defaultdict[bool, list[float]] = defaultdict(list)
    num_tokens, num_timed, timed_s = 0, 0, 0.0
    step_s, is_over = clock(), False
    while engine.has_work:
        outputs = engine.step()
        before_s, step_s = step_s, clock()
        num_tokens += sum(len(output.token_ids) for output in outputs)
        if len(last_s) == rows and not is_over:
            num_timed += sum(len(output.token_ids) for output in outputs)
            timed_s += step_s - before_s
            for output in outputs:
                is_other = output.request_id.startswith("other")
                gaps[is_other].append(step_s - last_s[output.request_id])
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"{kind.name}: {output.request_id}: {output.error}")
            last_s[output.request_id] = step_s
            is_over = is_over or output.finish_reason is not None
    if num_tokens != rows * output_tokens:
        raise RuntimeError(f"{kind.name}: {num_tokens} tokens came of {rows * output_tokens}")
    if not num_timed:
        raise RuntimeError(
            f"{kind.name}: the first row ended before the last began; {output_tokens} "
            "--output_tokens are too few"
        )
    return Timing(
        tokens_per_s=num_timed / timed_s,
        gaps_s=gaps[False],
        other_gaps_s=gaps[True],
    )


@dataclass(frozen=True, kw_only=True)
class Line:
    """What the rounds of one batch come to.

    Attributes:
      name: The batch's.
      rows: Its size.
      tokens_per_s: Median over the rounds.
      of_drawn: Median over the rounds of its rate over that of the plain drawn batch.
      gap_ms: Median time between tokens, of the rows of the first sort.
      other_gap_ms: Of the others; None: there are none.
    """

    name: str
    rows: int
    tokens_per_s: float
    of_drawn: float
    gap_ms: float
    other_gap_ms: float | None


def measure(
    engines: Sequence[tuple[str, Engine]],
    rows: int,
    output_tokens: int,
    num_rounds: int,
    clock: Callable[[], float],
) -> list[Line]:
    """Times every kind of batch on the first engine, and drawn ones on all."""
    (_, engine), *more = engines
    runs = [(kind.name, engine, kind) for kind in kinds(rows)]
    drawn = Kind(name="drawn", options=DRAWN)
    runs += [(name, other, drawn) for name, other in more]
    timings: defaultdict[str, list[Timing]] = defaultdict(list)
    for index in range(1 + num_rounds):
        # There and back, so that a steady drift of the machine cancels out.
        for name, one, kind in runs if index % 2 else reversed(runs):
            timing = run_batch(one, kind, rows, output_tokens, clock)
            if index:
                timings[name].append(timing)
    lines: list[Line] = []
    for name, found in timings.items():
        ratios = [
            timing.tokens_per_s / plain.tokens_per_s
            for timing, plain in zip(found, timings["drawn"], strict=True)
        ]
        others = [gap for timing in found for gap in timing.other_gaps_s]
        lines.append(
            Line(
                name=name,
                rows=rows,
                tokens_per_s=statistics.median(timing.tokens_per_s for timing in found),
                of_drawn=statistics.median(ratios),
                gap_ms=1e3 * statistics.median(gap for timing in found for gap in timing.gaps_s),
                other_gap_ms=1e3 * statistics.median(others) if others else None,
            )
        )
    order = [name for name, _, _ in runs]
    return sorted(lines, key=lambda line: order.index(line.name))


def build(config: EngineConfig) -> Engine:
    """The default model's engine."""
    path = fetch(DEFAULT_PRESET, default_cache_dir())
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(checkpoint.tokenizer_source)
    eos_token_ids = checkpoint.eos_token_ids | tokenizer.eos_token_ids
    return build_engine(
        checkpoint,
        config,
        eos_token_ids=eos_token_ids,
        clock=time.monotonic,
        on_progress=_ignore,
        guides=Guides(
            tokenizer, vocab_size=checkpoint.config.vocab_size, eos_token_ids=eos_token_ids
        ),
    ).engine


def _ignore(stage: str, done: int, total: int) -> None:
    pass


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    flags.DEFINE_multi_integer(
        "rows",
        None,
        "Requests at once; may be given several times. Default: 8 and 32.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "output_tokens", 64, "Of each request.", lower_bound=2, upper_bound=1024, flag_values=values
    )
    flags.DEFINE_integer("rounds", 5, "Timed rounds.", lower_bound=1, flag_values=values)
    flags.DEFINE_bool(
        "deterministic", False, "Time a deterministic engine beside it.", flag_values=values
    )
    flags.DEFINE_bool("json", False, "Print one JSON object.", flag_values=values)


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Measures and prints."""
    levels = values.rows or [8, 32]
    for rows in levels:
        if not 1 <= rows <= MAX_ROWS:
            raise UsageError(f"--rows is {rows}; it must be in [1, {MAX_ROWS}]")
    use_persistent_cache(default_cache_dir() / "compiled")
    config = EngineConfig(max_num_seqs=MAX_ROWS, max_model_len=2048)
    engines = [("plain", build(config))]
    if values.deterministic:
        deterministic = EngineConfig(
            max_num_seqs=MAX_ROWS,
            max_model_len=2048,
            prefill_chunk_tokens=PROMPT_TOKENS,
            deterministic=True,
        )
        engines.append(("drawn, --deterministic", build(deterministic)))
    num_compiled = compile_events()
    lines = [
        line
        for rows in levels
        for line in measure(engines, rows, values.output_tokens, values.rounds, time.perf_counter)
    ]
    num_compiled = compile_events() - num_compiled
    if values.json:
        found = {"lines": [vars(line) for line in lines], "compile_events": num_compiled}
        print(json.dumps(found))
        return 0
    print(
        format_table(
            ("batch", "rows", "tokens/s", "of drawn", "ms between tokens", "of the others"),
            [
                (
                    line.name,
                    str(line.rows),
                    f"{line.tokens_per_s:.1f}",
                    f"{line.of_drawn:.2f}",
                    f"{line.gap_ms:.1f}",
                    "" if line.other_gap_ms is None else f"{line.other_gap_ms:.1f}",
                )
                for line in lines
            ],
        )
    )
    print(f"compilations while it ran: {num_compiled}")
    return 0


COMMAND = Command(
    program="python -m",
    name="octavo.bench.output_options",
    summary="Measures what options of requests cost: rules, guides, log-probabilities.",
    define_flags=define_flags,
    run=run,
)


if __name__ == "__main__":
    sys.exit(main(COMMAND))

"""`python -m octavo.bench.throughput`: how fast a server is, seen by its clients over gRPC.

At each level of concurrency, after a warm-up, rounds of greedy and of sampled requests alternate,
so that a machine that gets faster or slower does so for both. Throughput counts output tokens alone
and is timed end to end, from the first request sent to the last token received: prompts, queueing,
sampling, detokenization and transport are all inside.
"""

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from absl import flags

from ..server.command_line import Command, CommandError, UsageError, is_given
from ..server.table import format_table
from .closed_loop import BenchmarkFailed, Trace
from .entry_point import main
from .load import Load, LoadOptions, connected_load
from .load_flags import (
    SERVER_FLAGS,
    define_load_flags,
    define_server_flags,
    load_options,
    server_command,
)
from .report import describe, headline, spread
from .server_process import server_process
from .summary import Summary, summarize
from .workload import Mode


@dataclass(frozen=True, kw_only=True)
class Level:
    """The numbers of one level of concurrency."""

    concurrency: int
    greedy: Summary
    sampled: Summary

    @property
    def sampled_over_greedy(self) -> float:
        """Throughput of sampled over that of greedy requests; 0.85 is 15 % slower."""
        return self.sampled.tokens_per_s / self.greedy.tokens_per_s


async def measure_level(load: Load, concurrency: int, options: LoadOptions) -> Level:
    """Warms up, then measures.

    Raises:
      BenchmarkFailed: A request did not bring all its tokens.
    """
    rounds: dict[Mode, list[list[Trace]]] = {mode: [] for mode in Mode}
    for index in range(1 + options.rounds):
        is_warm_up = index == 0
        count = concurrency if is_warm_up else options.requests_per_round[concurrency]
        # There and back, so that a steady drift of the machine cancels out.
        for mode in Mode if index % 2 else reversed(Mode):
            rounds[mode].append(await load.round(mode, concurrency, load.take_prompts(count)))
    return Level(
        concurrency=concurrency,
        greedy=summarize(rounds[Mode.GREEDY][1:]),
        sampled=summarize(rounds[Mode.SAMPLED][1:]),
    )


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    flags.DEFINE_string(
        "server",
        None,
        "host:port of a running server. Default: start one, and stop it at the end.",
        flag_values=values,
    )
    define_server_flags(values)
    define_load_flags(values)


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Measures and prints."""
    options = load_options(values)
    if values.server:
        for name in SERVER_FLAGS:
            if is_given(values, name):
                raise UsageError(f"--{name} is for a server that is started; drop --server")
    asyncio.run(_run(values, options))
    return 0


async def _run(values: flags.FlagValues, options: LoadOptions) -> None:
    levels = []
    async with (
        _server(values) as address,
        connected_load(address, options, time.perf_counter) as load,
    ):
        for concurrency in options.concurrency:
            print(f"concurrency {concurrency} ...", file=sys.stderr)
            try:
                levels.append(await measure_level(load, concurrency, options))
            except BenchmarkFailed as error:
                raise CommandError(f"concurrency {concurrency}: {error}") from error
    print(
        json.dumps(as_json(load, options, levels))
        if values.json
        else as_text(load, options, levels)
    )


@asynccontextmanager
async def _server(values: flags.FlagValues) -> AsyncGenerator[str]:
    if values.server:
        yield values.server
        return
    async with server_process(server_command(values), values.start_timeout_s) as address:
        yield address


def as_json(load: Load, options: LoadOptions, levels: Sequence[Level]) -> dict[str, Any]:
    """Everything that was measured, and of what."""
    return describe(load, options) | {
        "levels": [
            dataclasses.asdict(level) | {"sampled_over_greedy": level.sampled_over_greedy}
            for level in levels
        ]
    }


def as_text(load: Load, options: LoadOptions, levels: Sequence[Level]) -> str:
    """A table, and above it what was measured."""
    header = ("clients", "mode", "tokens/s", "of greedy", "rounds", "TTFT ms", "ITL ms")
    rows = [
        (
            str(level.concurrency),
            mode.value,
            f"{summary.tokens_per_s:.1f}",
            f"{share:.2f}",
            spread(summary.rounds_tokens_per_s),
            f"{summary.ttft_ms:.1f}",
            "" if summary.itl_ms is None else f"{summary.itl_ms:.1f}",
        )
        for level in levels
        for mode, summary, share in (
            (Mode.GREEDY, level.greedy, 1.0),
            (Mode.SAMPLED, level.sampled, level.sampled_over_greedy),
        )
    ]
    return f"{headline(load, options)}\n{format_table(header, rows)}"


COMMAND = Command(
    program="python -m",
    name="octavo.bench.throughput",
    summary="Measures a server's throughput and latency in a closed loop over gRPC.",
    define_flags=define_flags,
    run=run,
)


if __name__ == "__main__":
    sys.exit(main(COMMAND))

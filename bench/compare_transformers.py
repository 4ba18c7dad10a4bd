"""`python -m octavo.bench.compare_transformers`: Octavo beside Hugging Face transformers.

Both load the same weights and run in turn on the same machine, round by round, so that what else
the machine does falls on both alike. What is compared favours the peer: Octavo's tokens per second
are end to end over gRPC, as in the throughput benchmark; the peer's are those of its decode steps
alone, in process, with all prompts there at once. Its end-to-end number is shown too.
"""

import asyncio
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from ..configs.presets import fetchable_preset_names
from ..models.fetch import FetchError, default_cache_dir, fetch
from ..server.command_line import Command, CommandError, UsageError
from ..server.table import format_table
from .closed_loop import BenchmarkFailed, Trace
from .entry_point import main
from .load import Load, LoadOptions, connected_load
from .load_flags import define_load_flags, define_server_flags, load_options, server_command
from .peer import Peer, PeerBatch, decode_tokens_per_s, running_peer, tokens_per_s
from .peer_environment import (
    PEER_PYTHON_VARIABLE,
    PeerPython,
    default_directory,
    find_peer_python,
)
from .report import describe, headline, spread
from .server_process import server_process
from .summary import Summary, summarize
from .workload import Mode

SETTLE_S = 0.25
"""Thread pools spin for a while before they sleep; the other side's turn begins after that."""

STEADY_FACTOR = 1.25
"""Rounds on a quiet machine differ by less. A busy one slows the sides unequally: torch's threads
wait for each other at every operator, and one neighbour on two cores takes nine tenths of its speed
(seen), so a comparison made there would flatter Octavo."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The numbers of one level of concurrency, which is the peer's batch size.

    Attributes:
      concurrency: Octavo's clients and the peer's batch.
      greedy: Octavo, greedy, end to end.
      sampled: Octavo, sampled, end to end.
      peer_decode_tokens_per_s: The peer's decode steps alone, of each round.
      peer_tokens_per_s: The peer with prefill, of each round.
      same_first_token: Share of prompts whose first greedy token is the same on both sides: a check
        that both run the same weights on the same prompts. Rounding makes it less than 1.
    """

    concurrency: int
    greedy: Summary
    sampled: Summary
    peer_decode_tokens_per_s: tuple[float, ...]
    peer_tokens_per_s: tuple[float, ...]
    same_first_token: float

    @property
    def greedy_over_peer(self) -> float:
        """Octavo end to end over the peer's decode steps alone; medians of both."""
        return self.greedy.tokens_per_s / statistics.median(self.peer_decode_tokens_per_s)

    @property
    def sampled_over_greedy(self) -> float:
        """Throughput of sampled over that of greedy requests; 0.85 is 15 % slower."""
        return self.sampled.tokens_per_s / self.greedy.tokens_per_s


async def compare_level(
    load: Load, peer: Peer, concurrency: int, options: LoadOptions
) -> Comparison:
    """Warms up all kinds, then measures them in turn.

    Raises:
      BenchmarkFailed: A request did not bring all its tokens.
      PeerFailed: The peer did not.
    """
    octavo: dict[Mode, list[list[Trace]]] = {mode: [] for mode in Mode}
    transformers: list[list[PeerBatch]] = []
    for index in range(1 + options.rounds):
        is_warm_up = index == 0
        count = concurrency if is_warm_up else options.requests_per_round[concurrency]
        prompts = {mode: load.take_prompts(count) for mode in Mode}
        turns = [Mode.GREEDY, None, Mode.SAMPLED]
        # There and back, so that a steady drift of the machine cancels out.
        for turn in turns if index % 2 else reversed(turns):
            if turn is None:
                transformers.append(
                    await _peer_round(peer, concurrency, prompts[Mode.GREEDY], options)
                )
            else:
                octavo[turn].append(await load.round(turn, concurrency, prompts[turn]))
            await asyncio.sleep(SETTLE_S)
    greedy, sampled, transformers = (
        octavo[Mode.GREEDY][1:],
        octavo[Mode.SAMPLED][1:],
        transformers[1:],
    )
    return Comparison(
        concurrency=concurrency,
        greedy=summarize(greedy),
        sampled=summarize(sampled),
        peer_decode_tokens_per_s=tuple(map(decode_tokens_per_s, transformers)),
        peer_tokens_per_s=tuple(map(tokens_per_s, transformers)),
        same_first_token=_same_first_token(greedy, transformers),
    )


async def _peer_round(
    peer: Peer, concurrency: int, prompts: Sequence[Sequence[int]], options: LoadOptions
) -> list[PeerBatch]:
    return [
        await peer.generate(prompts[start : start + concurrency], options.workload.output_tokens)
        for start in range(0, len(prompts), concurrency)
    ]


def _same_first_token(
    octavo: Sequence[Sequence[Trace]], transformers: Sequence[Sequence[PeerBatch]]
) -> float:
    """Both sides ran the same prompts in the same order."""
    ours = [trace.token_ids[0] for traces in octavo for trace in traces]
    theirs = [ids[0] for batches in transformers for batch in batches for ids in batch.token_ids]
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    flags.DEFINE_string(
        "peer_python",
        None,
        "Python of an environment with torch and transformers. Default: "
        f"${PEER_PYTHON_VARIABLE}, or else what `make peer-env` made.",
        flag_values=values,
    )
    define_server_flags(values)
    define_load_flags(values)


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Measures and prints."""
    options = load_options(values)
    command = server_command(values)
    python = find_peer_python(values.peer_python, os.environ, default_directory())
    asyncio.run(_run(values, options, command, python))
    return 0


async def _run(
    values: flags.FlagValues, options: LoadOptions, command: Sequence[str], python: PeerPython
) -> None:
    timeout_s = values.start_timeout_s
    levels = []
    async with (
        running_peer(python.path, model_path(values.model), values.dtype, timeout_s) as peer,
        server_process(command, timeout_s) as address,
        connected_load(address, options, time.perf_counter) as load,
    ):
        for concurrency in options.concurrency:
            print(f"concurrency {concurrency} ...", file=sys.stderr)
            try:
                levels.append(await compare_level(load, peer, concurrency, options))
            except BenchmarkFailed as error:
                raise CommandError(f"concurrency {concurrency}: {error}") from error
        ready = python.versions | peer.ready
    if values.json:
        print(json.dumps(as_json(load, options, ready, levels)))
    else:
        print(as_text(load, options, ready, levels))


def model_path(model: str) -> Path:
    """Where the peer finds the weights that `octavo serve --model` serves.

    Raises:
      CommandError: They cannot be had.
    """
    if model in fetchable_preset_names():
        try:
            return fetch(model, default_cache_dir())
        except FetchError as error:
            raise CommandError(str(error)) from error
    path = Path(model)
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if not (is_gguf or (path / "config.json").is_file()):
        raise UsageError(
            f"--model is {model!r}; transformers reads a preset "
            f"({', '.join(fetchable_preset_names())}), a GGUF file or a Hugging Face folder"
        )
    return path.resolve()


def as_json(
    load: Load, options: LoadOptions, ready: dict[str, Any], levels: Sequence[Comparison]
) -> dict[str, Any]:
    """Everything that was measured, and of what."""
    return describe(load, options) | {
        "peer": ready,
        "levels": [
            dataclasses.asdict(level)
            | {
                "greedy_over_peer": level.greedy_over_peer,
                "sampled_over_greedy": level.sampled_over_greedy,
            }
            for level in levels
        ],
    }


def as_text(
    load: Load, options: LoadOptions, ready: dict[str, Any], levels: Sequence[Comparison]
) -> str:
    """A table, and above it what was measured."""
    header = ("clients", "who", "timed", "tokens/s", "rounds", "of peer's decode", "of greedy")
    rows = []
    for level in levels:
        decode = level.peer_decode_tokens_per_s
        base, greedy = statistics.median(decode), level.greedy.tokens_per_s
        for who, timed, speeds in (
            ("transformers", "decode", decode),
            ("transformers", "prefill + decode", level.peer_tokens_per_s),
            ("octavo greedy", "end to end", level.greedy.rounds_tokens_per_s),
            ("octavo sampled", "end to end", level.sampled.rounds_tokens_per_s),
        ):
            middle = statistics.median(speeds)
            is_octavo = who.startswith("octavo")
            rows.append(
                (
                    str(level.concurrency),
                    who,
                    timed,
                    f"{middle:.1f}",
                    spread(speeds),
                    f"{middle / base:.2f}",
                    f"{middle / greedy:.2f}" if is_octavo else "",
                )
            )
    warnings = [
        f"WARNING: at {level.concurrency} clients the rounds of {who} differ by a factor of "
        f"{max(speeds) / min(speeds):.1f}: something else was running, and the ratios mean little"
        for level in levels
        for who, speeds in (
            ("transformers", level.peer_decode_tokens_per_s),
            ("octavo", level.greedy.rounds_tokens_per_s),
        )
        if max(speeds) / min(speeds) > STEADY_FACTOR
    ]
    agreement = ", ".join(f"{level.same_first_token:.0%}" for level in levels)
    return "\n".join(
        (
            headline(load, options),
            f"transformers {ready['transformers']}, torch {ready['torch']}, {ready['dtype']}, "
            f"{ready['num_threads']} threads, greedy; the batch is the number of clients",
            format_table(header, rows),
            f"same first token on both sides: {agreement} of the prompts",
            *warnings,
        )
    )


COMMAND = Command(
    program="python -m",
    name="octavo.bench.compare_transformers",
    summary="Measures Octavo and Hugging Face transformers in turn, on the same weights.",
    define_flags=define_flags,
    run=run,
)

if __name__ == "__main__":
    sys.exit(main(COMMAND))

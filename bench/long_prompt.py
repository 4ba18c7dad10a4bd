"""`python -m octavo.bench.long_prompt`: what one long prompt does to chats that decode beside it.

For each --inter_token_target_ms a server of its own: first the long prompt alone; then chats, and
the long prompt beside them. The chats' own pace is taken for as long before the long prompt as
after it, because it falls as their contexts grow. All in one run, so the numbers to compare come
from the same minutes. The flag trades the chats' time between tokens for the long prompt's time to
first token; the curve shows how.
"""

import asyncio
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from absl import flags

from ..server import octavo_pb2 as pb
from ..server import octavo_pb2_grpc
from ..server.command_line import Command, CommandError, UsageError
from ..server.table import format_table
from .closed_loop import Clock
from .entry_point import main
from .load_flags import define_server_flags, server_command
from .scatter_plot import Axis, scatter_svg
from .server_process import server_process

SETTLE_S = 2.0
"""After the chats began, and after the long prompt, before their pace counts."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What runs.

    Attributes:
      long_tokens: Of the long prompt.
      num_chats: That decode beside it.
      chat_tokens: Of each chat's prompt.
      alone_s: How long the chats decode without it, for comparison; half before and half after.
      rounds: Long prompts, alone and beside the chats.
      seed: Of the prompts.
    """

    long_tokens: int
    num_chats: int
    chat_tokens: int
    alone_s: float
    rounds: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one setting of the flag gives. Times in milliseconds; ITL: between a chat's tokens.

    Attributes:
      target_ms: The flag; None: not given.
      itl_p50_ms, itl_p99_ms: Of the chats, without the long prompt.
      beside_p50_ms, beside_p99_ms: Of the chats, while it is prefilled.
      solo_ttft_ms: Of the long prompt alone.
      ttft_ms: Of the long prompt beside the chats.
    """

    target_ms: float | None
    itl_p50_ms: float
    itl_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    solo_ttft_ms: float
    ttft_ms: float

    @property
    def itl_ratio(self) -> float:
        """How much longer the chats' p99 is beside the long prompt."""
        return self.beside_p99_ms / self.itl_p99_ms

    @property
    def ttft_ratio(self) -> float:
        """How much longer the long prompt takes beside the chats."""
        return self.ttft_ms / self.solo_ttft_ms


class _Chat:
    """One decoding stream; `gaps` are (when, seconds since the token before)."""

    def __init__(
        self,
        stub: octavo_pb2_grpc.InferenceStub,
        prompt: Sequence[int],
        max_tokens: int,
        clock: Clock,
    ) -> None:
        self.gaps: list[tuple[float, float]] = []
        self._clock = clock
        self._call = stub.Generate(_request(prompt, max_tokens))

    def cancel(self) -> None:
        self._call.cancel()

    async def read(self) -> None:
        last_s: float | None = None
        async for event in self._call:
            if event.WhichOneof("event") == "token_delta":
                now_s = self._clock()
                if last_s is not None:
                    self.gaps.append((now_s, now_s - last_s))
                last_s = now_s
            elif event.WhichOneof("event") in ("completed", "failed"):
                raise CommandError("a chat ended before the measurement did: use a longer context")


async def measure(address: str, target_ms: float | None, options: Options, clock: Clock) -> Outcome:
    """Runs one setting against a server that has it."""
    draw = random.Random(options.seed)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = octavo_pb2_grpc.InferenceStub(channel)
        info = await octavo_pb2_grpc.ControlStub(channel).GetModelInfo(pb.GetModelInfoRequest())

        def prompt(num_tokens: int) -> list[int]:
            return [draw.randrange(info.vocab_size) for _ in range(num_tokens)]

        await _ttft_s(stub, prompt(options.long_tokens // 4), clock)  # touches the pages
        solo_s = [
            await _ttft_s(stub, prompt(options.long_tokens), clock) for _ in range(options.rounds)
        ]
        # A chat ends with its context; so long a one that it outlasts the measurement.
        max_tokens = info.max_model_len - options.chat_tokens
        alone: list[float] = []
        beside: list[float] = []
        ttfts_s: list[float] = []
        for _ in range(options.rounds):
            chats = [
                _Chat(stub, prompt(options.chat_tokens), max_tokens, clock)
                for _ in range(options.num_chats)
            ]
            readers = [asyncio.create_task(chat.read()) for chat in chats]
            await _until_decoding(chats, readers)
            await asyncio.sleep(SETTLE_S)
            began_s = clock()
            await asyncio.sleep(options.alone_s / 2)
            sent_s = clock()
            ttfts_s.append(await _ttft_s(stub, prompt(options.long_tokens), clock))
            ended_s = clock()
            await asyncio.sleep(SETTLE_S)
            again_s = clock()
            await asyncio.sleep(options.alone_s / 2)
            for chat, reader in zip(chats, readers, strict=True):
                if reader.done():
                    reader.result()
                alone += [gap for at, gap in chat.gaps if began_s <= at < sent_s or at >= again_s]
                beside += [gap for at, gap in chat.gaps if sent_s <= at < ended_s]
                chat.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    return Outcome(
        target_ms=target_ms,
        itl_p50_ms=statistics.median(alone) * 1e3,
        itl_p99_ms=_p99(alone) * 1e3,
        beside_p50_ms=statistics.median(beside) * 1e3,
        beside_p99_ms=_p99(beside) * 1e3,
        solo_ttft_ms=statistics.median(solo_s) * 1e3,
        ttft_ms=statistics.median(ttfts_s) * 1e3,
    )


async def _until_decoding(chats: Sequence[_Chat], readers: Sequence[asyncio.Task[None]]) -> None:
    while not all(chat.gaps for chat in chats):
        for reader in readers:
            if reader.done():
                reader.result()
        await asyncio.sleep(0.05)


async def _ttft_s(
    stub: octavo_pb2_grpc.InferenceStub, prompt: Sequence[int], clock: Clock
) -> float:
    sent_s = clock()
    first_s: float | None = None
    async for event in stub.Generate(_request(prompt, 2)):
        kind = event.WhichOneof("event")
        if kind == "token_delta" and first_s is None:
            first_s = clock()
        if kind == "failed":
            raise CommandError(f"the long prompt failed: {event.failed.message}")
    if first_s is None:
        raise CommandError("the long prompt brought no token")
    return first_s - sent_s


def _request(prompt: Sequence[int], max_tokens: int) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    flags.DEFINE_list(
        "targets_ms",
        ["none", "300", "200", "150", "120", "100", "80"],
        "Values of --inter_token_target_ms to try, each on a server of its own; none: not given.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "long_tokens", 8000, "Of the long prompt.", lower_bound=64, flag_values=values
    )
    flags.DEFINE_integer(
        "chats", 16, "Chats that decode beside it.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer(
        "chat_tokens", 512, "Of each chat's prompt.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_float(
        "alone_s",
        10.0,
        "Seconds that the chats decode without it, half before and half after.",
        lower_bound=1.0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "rounds", 1, "Long prompts with and without chats.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer("seed", 0, "Of the prompts.", flag_values=values)
    flags.DEFINE_string("plot", None, "SVG file that gets the curve.", flag_values=values)
    flags.DEFINE_bool("json", False, "Print one JSON object.", flag_values=values)
    define_server_flags(values)


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Measures and prints."""
    options = Options(
        long_tokens=values.long_tokens,
        num_chats=values.chats,
        chat_tokens=values.chat_tokens,
        alone_s=values.alone_s,
        rounds=values.rounds,
        seed=values.seed,
    )
    targets = [_target(word) for word in values.targets_ms]
    outcomes = asyncio.run(_measure_all(values, targets, options))
    if values.plot:
        Path(values.plot).write_text(plot(outcomes, options), encoding="utf-8")
    print(json.dumps(as_json(outcomes, options)) if values.json else as_text(outcomes, options))
    return 0


def _target(word: str) -> float | None:
    try:
        return None if word == "none" else float(word)
    except ValueError as error:
        raise UsageError(f"--targets_ms has {word!r}; it must be numbers or none") from error


async def _measure_all(
    values: flags.FlagValues, targets: Sequence[float | None], options: Options
) -> list[Outcome]:
    outcomes = []
    for target_ms in targets:
        print(f"target {target_ms} ...", file=sys.stderr)
        command = server_command(values)
        if target_ms is not None:
            command.append(f"--inter_token_target_ms={target_ms}")
        async with server_process(command, values.start_timeout_s) as address:
            outcomes.append(await measure(address, target_ms, options, time.perf_counter))
    return outcomes


def as_json(outcomes: Sequence[Outcome], options: Options) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "options": dataclasses.asdict(options),
        "outcomes": [
            dataclasses.asdict(outcome)
            | {"itl_ratio": outcome.itl_ratio, "ttft_ratio": outcome.ttft_ratio}
            for outcome in outcomes
        ],
    }


def as_text(outcomes: Sequence[Outcome], options: Options) -> str:
    """A table, and above it what was measured."""
    header = (
        *("target ms", "chats ITL p50", "p99", "beside p50", "p99", "p99 ratio"),
        *("long TTFT alone", "beside", "ratio"),
    )
    rows = [
        (
            "none" if each.target_ms is None else f"{each.target_ms:g}",
            f"{each.itl_p50_ms:.1f}",
            f"{each.itl_p99_ms:.1f}",
            f"{each.beside_p50_ms:.1f}",
            f"{each.beside_p99_ms:.1f}",
            f"{each.itl_ratio:.2f}",
            f"{each.solo_ttft_ms:.0f}",
            f"{each.ttft_ms:.0f}",
            f"{each.ttft_ratio:.2f}",
        )
        for each in outcomes
    ]
    what = (
        f"one prompt of {options.long_tokens} tokens beside {options.num_chats} chats that began "
        f"with {options.chat_tokens}, {options.rounds} rounds; milliseconds"
    )
    return f"{what}\n{format_table(header, rows)}"


def plot(outcomes: Sequence[Outcome], options: Options) -> str:
    """The curve, as SVG."""
    points = [
        (
            each.ttft_ratio,
            each.itl_ratio,
            "none" if each.target_ms is None else f"{each.target_ms:g} ms",
        )
        for each in outcomes
    ]
    return scatter_svg(
        f"{options.long_tokens}-token prompt beside {options.num_chats} chats, by "
        "inter_token_target_ms",
        Axis(title="time to first token of the long prompt, beside over alone", limit=4.0),
        Axis(title="p99 between the chats' tokens, beside over alone", limit=2.5),
        points,
    )


COMMAND = Command(
    program="python -m",
    name="octavo.bench.long_prompt",
    summary="Measures what one long prompt and chats that decode do to each other.",
    define_flags=define_flags,
    run=run,
)


if __name__ == "__main__":
    sys.exit(main(COMMAND))

"""A peer engine in a process of its own, asked in lines of JSON for one batch after another."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..server.command_line import CommandError
from .server_process import stop_process

# One line holds all ids of a batch.
_LINE_LIMIT_BYTES = 64 << 20

SCRIPT = Path(__file__).with_name("transformers_peer.py")
"""What the peer's interpreter runs."""


class PeerFailed(CommandError):
    """The peer ended, or did not answer as it must."""


@dataclass(frozen=True, kw_only=True)
class PeerBatch:
    """What one batch took.

    Attributes:
      token_ids: Output ids of each prompt, in the prompts' order.
      prefill_s: Seconds until the first token of each was there.
      decode_s: Seconds from there to the last token.
    """

    token_ids: list[list[int]]
    prefill_s: float
    decode_s: float


def parse_batch(line: bytes, num_prompts: int, output_tokens: int) -> PeerBatch:
    """Reads an answer.

    Raises:
      PeerFailed: It is none, or some output has another length than was asked for.
    """
    answer = _object(line)
    try:
        batch = PeerBatch(
            token_ids=[[int(token_id) for token_id in ids] for ids in answer["token_ids"]],
            prefill_s=float(answer["prefill_s"]),
            decode_s=float(answer["decode_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PeerFailed(f"the peer's answer is {line[:200]!r}; {error!r}") from error
    lengths = [len(ids) for ids in batch.token_ids]
    if lengths != [output_tokens] * num_prompts:
        raise PeerFailed(
            f"the peer's outputs have {lengths} tokens; it must be {output_tokens} for each of "
            f"{num_prompts} prompts"
        )
    if not (batch.prefill_s > 0 and batch.decode_s > 0):
        raise PeerFailed(
            f"the peer took {batch.prefill_s} s and {batch.decode_s} s; it must be above 0"
        )
    return batch


def tokens_per_s(batches: Sequence[PeerBatch]) -> float:
    """Output tokens per second, prefill included."""
    num_tokens = sum(len(ids) for batch in batches for ids in batch.token_ids)
    return num_tokens / sum(batch.prefill_s + batch.decode_s for batch in batches)


def decode_tokens_per_s(batches: Sequence[PeerBatch]) -> float:
    """Tokens per second of the decode steps alone: without prefill, and without its token."""
    num_tokens = sum(len(ids) - 1 for batch in batches for ids in batch.token_ids)
    return num_tokens / sum(batch.decode_s for batch in batches)


class Peer:
    """A peer that has loaded its model.

    Attributes:
      ready: What it said of itself when it had.
    """

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any]) -> None:
        """To be had from `running_peer`."""
        self.ready = ready
        self._process = process

    async def generate(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> PeerBatch:
        """Runs one batch greedily, all prompts of one length.

        Raises:
          PeerFailed: It does not answer as it must.
        """
        line = await _ask(self._process, {"prompts": prompts, "output_tokens": output_tokens})
        return parse_batch(line, len(prompts), output_tokens)


@asynccontextmanager
async def running_peer(
    python: str, model: Path, dtype: str, start_timeout_s: float
) -> AsyncGenerator[Peer]:
    """Runs the peer while inside; what it says on stderr shows.

    Args:
      python: Interpreter that has what the peer imports.
      model: GGUF file or Hugging Face folder.
      dtype: Of its weights: bfloat16 or float32.
      start_timeout_s: How long it may take to load.

    Raises:
      PeerFailed: It ended, or the time was over, before it was ready.
    """
    process = await asyncio.create_subprocess_exec(
        # -P: the folder of the script is no place to import from.
        *(python, "-P", str(SCRIPT)),
        *(f"--model={model}", f"--dtype={dtype}", f"--num_threads={_num_cores()}"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=_LINE_LIMIT_BYTES,
    )
    try:
        try:
            async with asyncio.timeout(start_timeout_s):
                ready = _object(await _read(process)).get("ready")
        except TimeoutError as error:
            raise PeerFailed(f"the peer was not ready after {start_timeout_s:g} s") from error
        if not isinstance(ready, dict):
            raise PeerFailed("the peer's first line does not say that it is ready")
        yield Peer(process, ready)
    finally:
        await stop_process(process)


def _num_cores() -> int:
    """Those that this process, and so its children, may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


async def _ask(process: asyncio.subprocess.Process, question: dict[str, Any]) -> bytes:
    assert process.stdin is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    # A peer that has ended: reading says so, and with which code.
    with suppress(BrokenPipeError, ConnectionResetError):
        await process.stdin.drain()
    return await _read(process)


async def _read(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    if line := await process.stdout.readline():
        return line
    raise PeerFailed(f"the peer ended with {await process.wait()}")


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise PeerFailed(f"the peer's answer is {line[:200]!r}; it must be JSON") from error
    if not isinstance(found, dict):
        raise PeerFailed(f"the peer's answer is {line[:200]!r}; it must be an object")
    return found

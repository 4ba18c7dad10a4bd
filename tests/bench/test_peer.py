"""The peer's protocol, with an interpreter that only pretends to have torch.

Breaks when an answer that is incomplete, or a peer that ended, turns into a number.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.peer import (
    SCRIPT,
    PeerBatch,
    PeerFailed,
    decode_tokens_per_s,
    parse_batch,
    running_peer,
    tokens_per_s,
)
from octavo.bench.peer_environment import default_directory, find_peer_python
from octavo.server.command_line import CommandError

from .fakes import fake_python

GOLDENS = Path(__file__).parents[1] / "goldens" / "smollm2-135m-instruct.json"
ANSWER = {"token_ids": [[1, 2, 3], [4, 5, 6]], "prefill_s": 0.5, "decode_s": 1}


def test_an_answer() -> None:
    assert parse_batch(json.dumps(ANSWER).encode(), 2, 3) == PeerBatch(
        token_ids=[[1, 2, 3], [4, 5, 6]], prefill_s=0.5, decode_s=1.0
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Traceback (most recent call last):", "must be JSON"),
        ("[1]", "must be an object"),
        ("{}", "KeyError"),
        (json.dumps(ANSWER | {"decode_s": "fast"}), "fast"),
        (json.dumps(ANSWER | {"token_ids": 7}), "TypeError"),
        (json.dumps(ANSWER | {"token_ids": [[1, 2, 3]]}), r"have \[3\] tokens"),
        (json.dumps(ANSWER | {"token_ids": [[1, 2, 3], [4]]}), r"have \[3, 1\] tokens"),
        (json.dumps(ANSWER | {"decode_s": 0}), "must be above 0"),
        (json.dumps(ANSWER | {"prefill_s": float("nan")}), "must be above 0"),
    ],
)
def test_what_is_no_answer_is_an_error(line: str, message: str) -> None:
    with pytest.raises(PeerFailed, match=message):
        parse_batch(line.encode(), 2, 3)


def test_decode_speed_leaves_out_prefill_and_its_token() -> None:
    batch = PeerBatch(token_ids=[[1, 2, 3], [4, 5, 6]], prefill_s=0.5, decode_s=1.0)
    later = PeerBatch(token_ids=[[1, 2, 3], [4, 5, 6]], prefill_s=1.0, decode_s=3.0)
    assert tokens_per_s([batch]) == 4
    assert decode_tokens_per_s([batch]) == 4
    # Time counts, not the mean of speeds.
    assert tokens_per_s([batch, later]) == 12 / 5.5
    assert decode_tokens_per_s([batch, later]) == 2


def ask(python: str, *prompts: list[int], start_timeout_s: float = 30) -> Any:
    async def scenario() -> tuple[dict[str, Any], list[PeerBatch]]:
        async with running_peer(python, Path("a=b.gguf"), "bfloat16", start_timeout_s) as peer:
            return peer.ready, [await peer.generate([prompt], 3) for prompt in prompts]

    return asyncio.run(scenario())


def test_a_conversation(tmp_path: Path) -> None:
    ready, batches = ask(fake_python(tmp_path), [1, 2], [9])
    assert ready["dtype"] == "bfloat16"
    assert int(ready["num_threads"]) >= 1
    assert [batch.token_ids for batch in batches] == [[[1, 2, 1]], [[9, 9, 9]]]


def test_a_peer_that_ends_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="ended with 3"):
        ask(fake_python(tmp_path, answer="sys.exit(3)"), [1])


def test_a_peer_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexit 4\n")
    path.chmod(0o755)
    with pytest.raises(PeerFailed, match="ended with 4"):
        ask(str(path), [1])


def test_a_peer_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    with pytest.raises(PeerFailed, match=r"not ready after 0\.2 s"):
        ask(str(path), start_timeout_s=0.2)


def test_the_script_needs_neither_octavo_nor_jax() -> None:
    """Its environment has neither, and a Python that may be older: 3.11 here."""
    words = {
        word.strip(",")
        for line in SCRIPT.read_text().splitlines()
        if line.startswith(("import ", "from "))
        for word in line.split("#")[0].split()
    }
    assert words - {"import", "from"} == {
        *("argparse", "json", "os", "sys", "time", "pathlib", "Path", "typing", "Any"),
        *("torch", "transformers"),
    }


@pytest.mark.full
def test_the_real_peer_gives_the_goldens(default_model_path: Path) -> None:
    """The script itself: dense weights, right positions, a cache that works."""
    try:
        python = find_peer_python(None, os.environ, default_directory()).path
    except CommandError as error:
        pytest.skip(str(error))
    items = json.loads(GOLDENS.read_text())["items"][:3]

    async def scenario() -> list[PeerBatch]:
        async with running_peer(python, default_model_path, "float32", 600) as peer:
            return [await peer.generate([item["prompt_ids"]] * 2, 8) for item in items]

    found = [batch.token_ids for batch in asyncio.run(scenario())]
    assert found == [[item["greedy_ids"][:8]] * 2 for item in items]

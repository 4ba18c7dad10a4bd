"""`octavo serve` and `octavo generate` as users run them, on the real model."""

import json
import math
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest

from octavo.models.fetch import default_cache_dir
from octavo.server import octavo_pb2 as pb
from octavo.server.client import generate, open_channel

from .processes import OCTAVO, ROOT, server_process

# The engine of tests/engine's default_engine_float32: what it compiled is not compiled again.
SMALL = [
    "--dtype=float32",
    "--max_num_seqs=2",
    "--prefill_chunk_tokens=16",
    "--num_pages=64",
    f"--compilation_cache_dir={default_cache_dir() / 'compiled-by-tests'}",
]


def octavo(*arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [*OCTAVO, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def goldens() -> list[dict[str, Any]]:
    path = ROOT / "tests" / "goldens" / "smollm2-135m-instruct.json"
    return json.loads(path.read_text(encoding="utf-8"))["items"]


@pytest.fixture(scope="module")
def address(default_model_path: Path) -> Iterator[str]:
    """Of one small server in float32, which SIGTERM ends in good order."""
    serve = [*OCTAVO, "serve", "--port=0", f"--model={default_model_path}", *SMALL]
    serve.append("--withdrawal_grace_s=0")
    with server_process(serve) as server:
        assert server.ready_line.startswith("READY grpc=127.0.0.1:")
        yield server.address
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


NUM_TOKENS = 12  # the first golden's top two are at least 0.2 apart so far
TEXT = " Paris.\n\nThe answer is: 201"


def generated(address: str, golden: dict[str, Any], *flags: str) -> dict[str, Any]:
    """What `octavo generate --json` says to a golden's prompt."""
    prompt = f"--prompt={golden['prompt']}"
    return json.loads(octavo("generate", f"--server={address}", prompt, "--json", *flags))


def test_the_greedy_ids_of_the_golden(address: str, goldens: list[dict[str, Any]]) -> None:
    """In float32, through every layer there is."""
    golden = goldens[0]
    assert min(golden["top1_top2_gap"][:NUM_TOKENS]) > 0.2
    options = [f"--server={address}", f"--max_tokens={NUM_TOKENS}", "--ignore_eos"]
    for prompt in (
        f"--prompt={golden['prompt']}",
        f"--prompt_ids={','.join(map(str, golden['prompt_ids']))}",
    ):
        answer = json.loads(octavo("generate", prompt, *options, "--json", "--temperature=0"))
        assert answer["token_ids"] == golden["greedy_ids"][:NUM_TOKENS]
        assert answer["text"] == TEXT
    # The same seed gives the same text; --chat needs the model's own template.
    sampled = [*options, "--chat", "--prompt=Say hi.", "--seed=5", "--top_p=0.9"]
    assert octavo("generate", *sampled) == octavo("generate", *sampled)


def loglikelihoods(channel: grpc.Channel, ids: list[int]) -> tuple[list[float], list[bool]]:
    """What EleutherAI's lm-eval asks of ids, and makes of the answer: for each but the first, its
    log-probability, and whether greedy decoding would take it.
    """
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        sampling=pb.Sampling(max_tokens=1, temperature=0),
        response=pb.ResponseOptions(
            echo=True, logprobs=True, top_logprobs=1, prompt_logprobs=True, prompt_top_logprobs=1
        ),
    )
    answer = generate(channel, request, on_text=print)
    assert answer.prompt_token_ids == ids
    logprobs, tops = answer.prompt_logprobs, answer.prompt_top_logprobs
    assert len(logprobs) == len(tops) == len(ids) - 1  # the first token has none
    is_greedy = []
    for token_id, logprob, ((top_id, top),) in zip(ids[1:], logprobs, tops, strict=True):
        is_greedy.append(top_id == token_id)
        assert top == logprob if is_greedy[-1] else top > logprob
    (choice,) = answer.choices
    assert choice.top_logprobs == [[(choice.token_ids[0], choice.logprobs[0])]]
    assert answer.completed is not None
    usage = answer.completed.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), 1)
    return logprobs, is_greedy


def test_the_loglikelihood_request_of_lm_eval(address: str, goldens: list[dict[str, Any]]) -> None:
    """A golden's prompt and what greedy decoding made of it: all numbers and is_greedy are known.

    The log-probabilities are those of a prompt up to the prompt's end and of an output from there.
    """
    num_followed = 0
    with open_channel(address) as channel:
        for golden in goldens:
            context, gaps = golden["prompt_ids"], golden["top1_top2_gap"]
            num_clear = next((i for i, gap in enumerate(gaps[:8]) if gap <= 0.01), 8)
            follows = golden["greedy_ids"][:num_clear]
            expected = golden["prompt_logprobs"][1:] + golden["logprobs"][:num_clear]
            logprobs, is_greedy = loglikelihoods(channel, context + follows)
            assert logprobs == pytest.approx(expected, rel=0, abs=1e-3)
            for end in (len(context) - 1, len(expected)):  # of the prompt, and of all
                difference = math.fsum(logprobs[:end]) - math.fsum(expected[:end])
                assert abs(difference) <= 1e-3 * end
            assert is_greedy[len(context) - 1 :] == [True] * num_clear
            num_followed += num_clear
        context, follows = goldens[0]["prompt_ids"], goldens[0]["greedy_ids"][:3]
        second_best = goldens[0]["first_top5"][1]
        logprobs, is_greedy = loglikelihoods(channel, [*context, second_best[0], *follows[1:]])
        assert not is_greedy[len(context) - 1]
        assert logprobs[len(context) - 1] == pytest.approx(second_best[1], rel=0, abs=1e-3)
    assert num_followed > 0.9 * 8 * len(goldens), "close calls left little to compare"


def test_generate_ends_at_a_stop_string(address: str, goldens: list[dict[str, Any]]) -> None:
    """One that begins inside a token and ends inside another."""
    golden = goldens[0]
    stop = "e answer i"
    answer = generated(address, golden, "--temperature=0", "--stop=zebra", f"--stop={stop}")
    assert answer["text"] == TEXT[: TEXT.index(stop)]
    assert (answer["finish_reason"], answer["stop"]) == ("stop", stop)
    num_tokens = len(answer["token_ids"])
    assert 0 < num_tokens < NUM_TOKENS
    assert answer["token_ids"] == golden["greedy_ids"][:num_tokens]
    assert answer["usage"]["completion_tokens"] == num_tokens


def test_generate_gives_choices_and_top_log_probabilities(
    address: str, goldens: list[dict[str, Any]]
) -> None:
    golden = goldens[0]
    # With another seed a draw may fall between two ids closer than float32 rounds.
    flags = ["--seed=6", "--max_tokens=6", "--ignore_eos", "--logprobs", "--top_logprobs=3"]
    both = generated(address, golden, *flags, "--n=2")
    first, second = both["choices"]
    assert first["token_ids"] != second["token_ids"]
    assert generated(address, golden, *flags, "--n=2")["choices"] == both["choices"]
    assert generated(address, golden, *flags)["token_ids"] == first["token_ids"]
    assert both["usage"] == {
        "prompt_tokens": len(golden["prompt_ids"]),
        "completion_tokens": 12,
        "cached_tokens": 0,
    }
    for choice in (first, second):
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]) == len(choice["top_logprobs"]) == 6
        for token_id, logprob, tops in zip(
            choice["token_ids"], choice["logprobs"], choice["top_logprobs"], strict=True
        ):
            numbers = [top for _, top in tops]
            assert numbers == sorted(numbers, reverse=True)
            assert dict(tops).get(token_id, numbers[-1]) >= logprob
            assert dict(tops).get(token_id, logprob) == logprob
        # Of the model, so the same whatever was drawn.
        wanted = golden["first_top5"][:3]
        assert [top_id for top_id, _ in choice["top_logprobs"][0]] == [each for each, _ in wanted]
        assert [top for _, top in choice["top_logprobs"][0]] == pytest.approx(
            [top for _, top in wanted], rel=0, abs=1e-3
        )


def test_generate_follows_a_json_schema(address: str, goldens: list[dict[str, Any]]) -> None:
    """At temperature 1, where the model alone would write anything."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "people": {"type": "integer", "minimum": 1, "maximum": 9999},
            "kinds": {
                "type": "array",
                "items": {"enum": ["old", "large", "ünïcödé"]},
                "minItems": 1,
                "maxItems": 2,
            },
        },
        "required": ["city", "people", "kinds"],
        "additionalProperties": False,
    }
    answer = generated(
        address, goldens[0], f"--json_schema={json.dumps(schema)}", "--seed=1", "--max_tokens=128"
    )
    assert answer["finish_reason"] == "stop"
    jsonschema.validate(json.loads(answer["text"]), schema)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_signal_while_compiling_ends_it(
    number: signal.Signals, default_model_path: Path, tmp_path: Path
) -> None:
    """Fails if the process waits for compilations that are under way or queued."""
    serve = [*OCTAVO, "serve", "--port=0", f"--model={default_model_path}"]
    with server_process([*serve, f"--compilation_cache_dir={tmp_path}"], wait=False) as server:
        assert server.process.stderr is not None
        while "compiling" not in server.process.stderr.readline():
            assert server.process.poll() is None
        server.process.send_signal(number)
        assert server.process.wait(timeout=10) == 1
        assert server.process.communicate() == ("", "")


def test_ctrl_c_while_compiling_for_one_answer(default_model_path: Path, tmp_path: Path) -> None:
    """Fails if it waits for compilations that are queued: some tens of seconds."""
    generate = [*OCTAVO, "generate", f"--model={default_model_path}", "--prompt=a"]
    generate += [f"--compilation_cache_dir={tmp_path}", "--num_pages=64"]
    with server_process(generate, wait=False) as one:
        assert one.process.stderr is not None
        while "compiling" not in one.process.stderr.readline():
            assert one.process.poll() is None
        one.process.send_signal(signal.SIGINT)
        assert one.process.wait(timeout=5) == 130
        assert one.process.communicate() == ("", "interrupted\n")


@pytest.mark.full
def test_generate_without_a_server(default_model_path: Path) -> None:
    out = octavo(
        "generate",
        f"--model={default_model_path}",
        "--prompt=The capital of France is",
        "--max_tokens=3",
        "--temperature=0",
        "--max_model_len=64",
        "--num_pages=16",
    )
    assert out == " Paris.\n\n"

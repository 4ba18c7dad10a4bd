"""`octavo serve` and `octavo generate` as users run them, on the real model."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .processes import ROOT, server_process

OCTAVO = [sys.executable, "-m", "octavo.server"]
SMALL = [
    "--dtype=float32",
    "--max_num_seqs=2",
    "--prefill_chunk_tokens=8",
    "--max_model_len=128",
    "--num_pages=32",
]


def octavo(*arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [*OCTAVO, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NUM_TOKENS = 12  # the golden's top two are at least 0.2 apart so far


def test_serve_generate_and_sigterm(default_model_path: Path) -> None:
    """The golden's greedy ids, in float32, through every layer there is."""
    golden = json.loads(
        (ROOT / "tests" / "goldens" / "smollm2-135m-instruct.json").read_text(encoding="utf-8")
    )
    serve = [*OCTAVO, "serve", "--port=0", f"--model={default_model_path}", *SMALL]
    serve.append("--withdrawal_grace_s=0")
    with server_process(serve) as server:
        assert server.ready_line.startswith("READY grpc=127.0.0.1:")
        options = [f"--server={server.address}", f"--max_tokens={NUM_TOKENS}", "--ignore_eos"]
        greedy = [*options, "--json", "--temperature=0"]
        item = golden["items"][0]
        assert min(item["top1_top2_gap"][:NUM_TOKENS]) > 0.2
        for prompt in (
            f"--prompt={item['prompt']}",
            f"--prompt_ids={','.join(map(str, item['prompt_ids']))}",
        ):
            answer = json.loads(octavo("generate", prompt, *greedy))
            assert answer["token_ids"] == item["greedy_ids"][:NUM_TOKENS]
            assert answer["text"] == " Paris.\n\nThe answer is: 201"
        # The same seed gives the same text; --chat needs the model's own template.
        sampled = [*options, "--chat", "--prompt=Say hi.", "--seed=5", "--top_p=0.9"]
        assert octavo("generate", *sampled) == octavo("generate", *sampled)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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

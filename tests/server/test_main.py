"""The command line: help, errors in one line, and generate and chat against a (fake) server."""

import asyncio
import dataclasses
import importlib.metadata
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from absl import flags

from octavo.configs.scheduling_config import SchedulingConfig
from octavo.engine.refusals import Overloaded
from octavo.engine.request import FinishReason
from octavo.server import octavo_pb2 as pb
from octavo.server.main import COMMANDS, main
from octavo.server.request_flags import define_request_flags, set_request_flags
from octavo.server.scheduling_flags import define_scheduling_flags, scheduling_config

from .harness import eventually, running
from .processes import OCTAVO, ROOT, fake_server_command, server_process


@pytest.fixture(scope="module")
def address() -> Generator[str]:
    """A fake server, shared: requests do not disturb each other."""
    with server_process(fake_server_command()) as server:
        yield server.address


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"], ["-h"]])
def test_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == main(["version"]) == 0
    assert capsys.readouterr().out == f"{importlib.metadata.version('octavo')}\n" * 2


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: octavo {command}")
    assert "None" not in out  # a default that means nothing to users
    assert ".;" not in out  # what absl adds to flags that may be given again


def test_help_has_every_serve_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])
    out = capsys.readouterr().out
    for flag in (
        *("model", "host", "port", "dtype", "max_num_seqs", "max_num_batched_tokens"),
        *("prefill_chunk_tokens", "max_model_len", "page_size", "num_pages", "kv_cache_bytes"),
        *("seed", "max_num_queued", "served_model_name", "compilation_cache_dir"),
        *("withdrawal_grace_s", "drain_timeout_s", "stall_timeout_s", "host_kv_bytes"),
        *(field.name for field in dataclasses.fields(SchedulingConfig)),
    ):
        assert f"  --{flag}=" in out or f"  --[no]{flag}\n" in out, flag
    assert "(default: 50051)" in out
    assert "(default: smollm2-135m-instruct)" in out


BAD_COMMAND_LINES = {
    "serv": "did you mean 'serve'?",
    "bogus": "it must be one of serve, generate, chat, fetch, convert, plan, replay, version",
    "versoin": "did you mean 'version'?",
    "serve --prot=1": "Did you mean: port",
    "serve --port=65536": "--port is '65536'; it must be an integer in the range [0, 65535]",
    "serve --port=x": "--port is 'x'; it must be an integer in the range [0, 65535]",
    "serve --max_num_seqs=many": "--max_num_seqs is 'many'; it must be an integer",
    "serve --max_num_seqs=": "--max_num_seqs is ''; it must be an integer",
    "serve --dtype=int8": "--dtype is 'int8'; it must be one of bfloat16, float32",
    "serve --max_num_seqs=0": "--max_num_seqs is 0; it must be a whole number in [1, 4096]",
    "serve --max_num_batched_tokens=5": "--max_num_batched_tokens is 5; it must exceed",
    "serve --num_pages=9 --kv_cache_bytes=9": "--num_pages is 9 and kv_cache_bytes is 9",
    "serve --drain_timeout_s=nan": "--drain_timeout_s is nan; it must be",
    "serve --drain_timeout_s=-1": "--drain_timeout_s is -1.0; it must be",
    "serve --withdrawal_grace_s=-1": "--withdrawal_grace_s is -1.0; it must be",
    "serve --withdrawal_grace_s=inf": "--withdrawal_grace_s is inf; it must be",
    "serve --stall_timeout_s=0": "--stall_timeout_s is '0'; it must be a number >= 1.0",
    "serve --stall_timeout_s=nan": "--stall_timeout_s is nan; it must be",
    "serve --host_kv_bytes=-1": "--host_kv_bytes is -1; it must be a whole number in [0, ",
    "serve --host_kv_bytes=1 --noprefix_cache": "--host_kv_bytes is 1 and prefix_cache is False; ",
    "serve --event_log_max_bytes=9": "--event_log_max_bytes goes with --event_log",
    "serve --policy=lifo": "--policy is 'lifo'; it must be one of fcfs, priority, fair, deadline",
    "serve --prefix_cache=maybe": "--prefix_cache is 'maybe'; it must be true or false",
    "serve --noprefix_cache=1": "--noprefix_cache=1 does not take an argument",
    "serve --nohelp=x": "--nohelp=x does not take an argument",
    "serve --help=x": "--help is 'x'; it must be true or false",
    "serve --max_num_queued=-1": "--max_num_queued is -1; it must be a whole number in [0, ",
    "serve --max_queued_tokens=0": "--max_queued_tokens is 0; it must be a whole number in [1, ",
    "serve --max_tenant_running=0": "--max_tenant_running is 0; it must be",
    "serve --max_tenant_queued=-1": "--max_tenant_queued is -1; it must be",
    "serve --max_tenant_tokens=1": "--max_tenant_tokens is 1; it must be",
    "serve --max_predicted_wait_s=nan": "--max_predicted_wait_s is nan; it must be in [0.001, ",
    "serve --queue_ttl_s=0": "--queue_ttl_s is 0.0; it must be",
    "serve --priority_ageing_s=inf": "--priority_ageing_s is inf; it must be",
    "serve --default_ttft_target_s=-1": "--default_ttft_target_s is -1.0; it must be",
    "serve --inter_token_target_ms=0": "--inter_token_target_ms is 0.0; it must be",
    "serve --tenant_weights=a": "--tenant_weights has 'a'; it must be NAME=WEIGHT",
    "serve --tenant_weights=a=1,b=x": "--tenant_weights has 'b=x'; it must be NAME=WEIGHT",
    "serve --tenant_weights=a=nan": "--tenant_weights has nan for 'a'; a weight must be in",
    "serve --tenant_weights=a=1,a=2": "no tenant may come twice",
    "serve --tenant_weights=\udcff=2": "--tenant_weights is '\\udcff=2'; it must be UTF-8",
    "serve smollm2": "'smollm2' is too much; usage: octavo serve [flags]",
    "serve --port=0 --model=/no/such/file": "--model is '/no/such/file'; it must be a preset (",
    "serve --flagfile=/no/such/file": "/no/such/file",
    "fetch": "NAME is missing; usage: octavo fetch NAME [flags]",
    "fetch other": "NAME is 'other'; it must be one of smollm2-135m-instruct",
    "convert smollm2-135m-instruct b": "octavo fetch smollm2-135m-instruct` prints",
    "convert a": "DST is missing; usage: octavo convert SRC DST [flags]",
    "generate": "give either --prompt or --prompt_ids",
    "generate --prompt=a --prompt_ids=1": "give either --prompt or --prompt_ids",
    "generate --prompt_ids=1,b": "--prompt_ids is 1,b; it must be whole numbers",
    "generate --prompt_ids=-1": "--prompt_ids has -1",
    "generate --prompt_ids=1 --chat": "--chat goes with --prompt",
    "generate --prompt=\udcff": "--prompt is '\\udcff'; it must be UTF-8",
    "chat --system=\udcff": "--system is '\\udcff'; it must be UTF-8",
    "serve --served_model_name=\udcff": "--served_model_name is '\\udcff'; it must be UTF-8",
    "generate --prompt=a --tenant=\udcff": "--tenant is '\\udcff'; it must be UTF-8",
    "generate --prompt=a --priority=99999999999999999999": "--priority is 99999999999999999999; it",
    "generate --prompt=a --logprobs": "--logprobs goes with --json",
    "generate --prompt=a --seed=-1 --server=localhost:1": "--seed is -1; it must be in [0, 2**64)",
    "generate --prompt=a --stop_token_ids=-1 --server=localhost:1": "--stop_token_ids has -1",
    "generate --prompt=a --temperature=-1": "--temperature is -1.0; it must be 0 or in",
    "generate --prompt=a --json --n=0": "--n is 0; it must be in [1, 128]",
    "generate --prompt=a --json --top_logprobs=3": "--top_logprobs is 3; it must be 0 without",
    "generate --prompt=a --json_object --ignore_eos": "--ignore_eos is True; it must be",
    "chat --top_p=2": "--top_p is 2.0; it must be in (0, 1]",
    "generate --prompt=a --server=localhost:1 --page_size=16": "--page_size is for a model in",
    "generate --prompt=a --server=http://localhost:1": "--server is 'http://localhost:1'; it must",
}


@pytest.mark.parametrize("line", BAD_COMMAND_LINES)
def test_bad_command_lines_end_in_one_line(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, errors = capfd.readouterr()
    assert out == ""
    last = errors.splitlines()[-1]
    assert last.startswith("octavo")
    assert ": error: " in last
    assert BAD_COMMAND_LINES[line] in last
    assert "Traceback" not in errors


def test_flagfile(tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str) -> None:
    file = tmp_path / "flags"
    file.write_text(f"--server={address}\n--prompt=hello\n--max_tokens=4\n")
    assert main(["generate", f"--flagfile={file}"]) == 0
    assert capsys.readouterr().out.endswith("hel\n")  # and the id that starts a text


def test_a_flagfile_that_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flags"
    file.write_bytes(b"--prompt=\xff\n")
    assert main(["generate", f"--flagfile={file}"]) == 2
    assert capsys.readouterr().err.startswith("octavo generate: error: --flagfile has bytes")


def test_an_event_log_that_exists_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("old")
    assert main(["serve", "--port=0", f"--model={tmp_path}", f"--event_log={log}"]) == 2
    assert capfd.readouterr().err == (
        f"octavo serve: error: --event_log is '{log}', which exists and is kept; choose another "
        "name\n"
    )
    assert log.read_text() == "old"


def test_a_reader_that_has_had_enough_is_no_error(address: str) -> None:
    """Fails with a traceback if a closed pipe is taken for a bug: `octavo generate ... | head`."""
    command = [*OCTAVO, "generate", f"--server={address}", "--prompt=hello", "--max_tokens=100"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=10) == 141


def in_shell(words: list[str], redirections: str) -> subprocess.CompletedProcess[str]:
    command = f"exec {shlex.join(words)} {redirections}"
    return subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


def test_streams_that_the_caller_closed(address: str) -> None:
    """Python has None in their place, and the next file to be opened gets their number."""
    generate = [*OCTAVO, "generate", f"--server={address}", "--prompt=hello", "--max_tokens=5"]
    done = in_shell(generate, "2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hell\n", "")
    done = in_shell(generate, ">&-")
    assert (done.returncode, done.stdout) == (0, "")
    done = in_shell([*OCTAVO, "chat", f"--server={address}"], "<&-")
    assert done.returncode == 0, done.stderr


def test_a_disk_that_is_full_is_one_line(address: str) -> None:
    generate = [*OCTAVO, "generate", f"--server={address}", "--prompt=hello", "--max_tokens=5"]
    done = in_shell(generate, ">/dev/full")
    assert done.returncode == 1
    assert done.stderr == "octavo generate: error: [Errno 28] No space left on device\n"


def test_ctrl_c_while_it_imports_says_nothing() -> None:
    """Fails with a traceback, or with an error of whatever was half-imported.

    Python says on stderr what was imported last, so this is about the same places on any machine.
    """
    importtime = [sys.executable, "-X", "importtime", *OCTAVO[1:]]
    for imported in ("octavo.server.engine_flags", "numpy", "jax", "octavo.server.serving"):
        with subprocess.Popen(
            [*importtime, "serve", "--port=0", "--num_pages=1"],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stderr is not None
            while not (line := process.stderr.readline()).rstrip().endswith(f" {imported}"):
                assert line, f"{imported} is not imported"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=10)
        assert "Traceback" not in errors
        assert process.returncode in (-signal.SIGINT, 1, 130)


def test_a_process_in_the_background_ignores_ctrl_c_from_the_start() -> None:
    """A shell's `&` sets SIGINT to be ignored; fails with -2 if an import takes that back."""
    command = [*OCTAVO, "serve", "--port=0", "--num_pages=1"]
    with subprocess.Popen(
        ["sh", "-c", f"trap '' INT; exec {shlex.join(command)}"], cwd=ROOT, stderr=subprocess.PIPE
    ) as process:
        for _ in range(10):
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 2  # the pages are too few


@pytest.mark.parametrize("encoding", ["", "utf-8:strict"])
def test_chat_goes_on_after_bytes_that_are_not_text(encoding: str, address: str) -> None:
    command = [*OCTAVO, "chat", f"--server={address}", "--max_tokens=9"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": encoding},
        input=b"h\xff\nhello\n",
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert b"your message is 'h\\udcff'; it must be UTF-8" in done.stderr
    assert b"<user>hel" in done.stdout
    assert b"[cut at --max_tokens or the context limit]" in done.stdout


def test_generate_prints_text_and_a_summary(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["generate", f"--server={address}", "--prompt_ids=104,105,195,169", "--max_tokens=6"]
    assert main(line) == 0
    out, errors = capsys.readouterr()
    assert out == "hiéhi\n"
    assert errors == (
        "4 prompt (2 cached) + 6 output tokens, ended by length, first token after 0.500 s, "
        "then 10.0 tokens/s\n"
    )


def test_generate_json_has_everything(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", f"--server={address}", "--json", "--logprobs", "--prompt_logprobs"]
    line += ["--prompt_ids=65,66,67", "--stop_token_ids=67", "--temperature=0", "--seed=3"]
    assert main(line) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    shown = json.loads(out)
    assert len(shown.pop("request_id")) == 32  # the server's own
    assert shown == {
        "text": "ABC",
        "token_ids": [65, 66, 67],
        "finish_reason": "stop",
        "stop_token_id": 67,
        "stop": None,
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2},
        "timings": {"queue_s": 0.25, "ttft_s": 0.5, "e2e_s": 1.0},
        "num_preemptions": 3,
        "logprobs": [0, -1, -2],
        "prompt_logprobs": [-1, -2],
    }


def test_generate_says_whose_and_how_urgent_a_request_is() -> None:
    values = flags.FlagValues()
    define_request_flags(values)
    line = ["--tenant=acme", "--priority=-3", "--request_class=chat", "--ttft_target_ms=250"]
    line += ["--tpot_target_ms=40", "--queue_ttl_ms=9e3", "--cache_salt=s", "--bypass_prefix_cache"]
    values(["-", *line])
    request = pb.GenerateRequest()
    set_request_flags(values, request)
    assert request == pb.GenerateRequest(
        tenant="acme",
        scheduling=pb.Scheduling(
            priority=-3,
            request_class="chat",
            ttft_target_ms=250,
            tpot_target_ms=40,
            queue_ttl_ms=9000,
        ),
        kv=pb.KvOptions(cache_salt="s", bypass_prefix_cache=True),
    )
    names = {
        field.name for kind in (pb.Scheduling, pb.KvOptions) for field in kind.DESCRIPTOR.fields
    }
    assert names | {"tenant"} == set(values)
    absent = flags.FlagValues()
    define_request_flags(absent)
    absent(["-"])
    request = pb.GenerateRequest()
    set_request_flags(absent, request)
    assert not request.scheduling.HasField("priority")
    assert not request.scheduling.HasField("ttft_target_ms")
    assert not request.kv.HasField("bypass_prefix_cache")


def test_serve_flags_become_the_scheduling_config() -> None:
    values = flags.FlagValues()
    define_scheduling_flags(values)
    values(["-"])
    assert scheduling_config(values) == SchedulingConfig()
    wanted = SchedulingConfig(
        policy="fair",
        prefix_cache=False,
        inter_token_target_ms=50.0,
        max_num_queued=9,
        max_queued_tokens=10,
        max_predicted_wait_s=11.0,
        queue_ttl_s=12.5,
        max_tenant_running=13,
        max_tenant_queued=14,
        max_tenant_tokens=15,
        priority_ageing_s=16.0,
        tenant_weights=(("a=b", 2.0), ("", 0.5)),
        default_ttft_target_s=17.0,
    )
    words = {field.name: getattr(wanted, field.name) for field in dataclasses.fields(wanted)}
    words |= {"tenant_weights": "a=b=2,=0.5", "prefix_cache": "false"}
    values = flags.FlagValues()
    define_scheduling_flags(values)
    values(["-", *(f"--{name}={word}" for name, word in words.items())])
    assert scheduling_config(values) == wanted


def test_an_overloaded_server_says_when_to_try_again(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with running() as at:
            at.engine.refusal = Overloaded("much is waiting", "max_num_queued", 2.34)
            line = ["generate", f"--server=127.0.0.1:{at.port}", "--prompt=a"]
            assert await asyncio.to_thread(main, line) == 1

    asyncio.run(scenario())
    assert capsys.readouterr().err == (
        "octavo generate: error: RESOURCE_EXHAUSTED: much is waiting; try again in 2.3 s\n"
    )


def test_generate_with_chat_uses_the_template(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["generate", f"--server={address}", "--prompt=hi", "--chat", "--max_tokens=8"]
    assert main(line) == 0
    assert capsys.readouterr().out == "<user>hi\n"


@pytest.mark.parametrize(
    ("flag", "said", "exit_code"),
    [
        ("--top_p=2", "--top_p is 2.0; it must be", 2),
        ("--temperature=nan", "--temperature is nan; it must be", 2),
        ("--max_tokens=0", "--max_tokens is 0; it must be", 2),
        ("--priority=101", "--priority is 101; it must be in [-100, 100]", 2),
        ("--ttft_target_ms=-1", "--ttft_target_ms is -1.0; in seconds it must be in", 2),
        (f"--tenant={'x' * 257}", "--tenant is 'xxxx", 2),
        ("--stop_token_ids=1,258", "--stop_token_ids[1] is 258; it must be", 2),
        ("--server=localhost:1", "UNAVAILABLE: ", 1),
    ],
)
def test_what_the_server_refuses_is_one_line_too(
    flag: str, said: str, exit_code: int, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["generate", f"--server={address}", "--prompt=a", flag]
    assert main(line) == exit_code
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith(f"octavo generate: error: {said}")
    assert errors.count("\n") == 1


def test_chat_remembers_and_survives_ctrl_c(address: str) -> None:
    """Fails if Ctrl-C ends the program, or if the history is not sent."""
    command = [*OCTAVO, "chat", f"--server={address}", "--system=S"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def say(line: bytes) -> None:
            assert process.stdin is not None
            process.stdin.write(line + b"\n")
            process.stdin.flush()

        def read_until(end: bytes) -> bytes:
            assert process.stdout is not None
            got = b""
            while not got.endswith(end):
                byte = process.stdout.read(1)
                assert byte, got
                got += byte
            return got

        say(b"one")
        read_until(b"> <system>S<user>one")
        process.send_signal(signal.SIGINT)  # the fake engine would go on for a minute
        read_until(b"[cancelled]\n")
        say(b"two")
        assert b"<system>S<user>one<assistant><system>S<user>one" in read_until(b"<user>two")
        process.send_signal(signal.SIGINT)
        read_until(b"[cancelled]\n")
        say(b"/exit")
        assert process.wait(timeout=10) == 0


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_an_output_that_is_not_complete_is_no_success(
    reason: FinishReason, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails with 0, which a script takes for an answer."""

    async def scenario() -> None:
        async with running() as at:
            line = ["generate", f"--server=127.0.0.1:{at.port}", "--prompt=a", "--json"]
            command = asyncio.create_task(asyncio.to_thread(main, line))
            await eventually(lambda: bool(at.engine.submitted))
            at.engine.abort(at.engine.submitted[0].request_id, reason)
            at.engine.step()
            assert await command == 1
            shown = json.loads(capsys.readouterr().out)
            assert shown["request_id"] == at.engine.submitted[0].request_id
            assert shown["finish_reason"] == reason.value

    asyncio.run(scenario())


def test_chat_looks_for_the_server_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if it greets, and says what is wrong only after the first message."""

    async def scenario() -> None:
        async with running(is_ready=False) as at:
            for address, said in (
                ("localhost:1", "UNAVAILABLE: "),
                (f"127.0.0.1:{at.port}", "UNAVAILABLE: the model is not loaded yet"),
            ):
                assert await asyncio.to_thread(main, ["chat", f"--server={address}"]) == 1
                out, errors = capsys.readouterr()
                assert out == ""
                assert errors.startswith(f"octavo chat: error: {said}")
                assert errors.count("\n") == 1

    asyncio.run(scenario())


def test_chat_says_whose_and_how_urgent_its_requests_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))

    async def scenario() -> None:
        async with running() as at:
            line = ["chat", f"--server=127.0.0.1:{at.port}", "--max_tokens=1"]
            line += ["--tenant=acme", "--priority=3", "--cache_salt=s"]
            command = asyncio.create_task(asyncio.to_thread(main, line))
            await eventually(lambda: bool(at.engine.submitted))
            await at.run_to_end()
            assert await command == 0
            (request,) = at.engine.submitted
            assert (request.tenant, request.priority, request.cache_salt) == ("acme", 3, "s")

    asyncio.run(scenario())
    assert "[cut at" in capsys.readouterr().out


def test_a_remote_client_needs_no_jax(address: str) -> None:
    code = (
        "import sys; sys.modules['jax'] = None; from octavo.server.main import main; "
        f"sys.exit(main(['generate', '--server={address}', '--prompt=a', '--max_tokens=1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr

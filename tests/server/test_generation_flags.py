"""The flags of `octavo generate` and `chat`: what is sent, what is refused, what --json shows."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from absl import flags

from octavo.engine.sampling_params import Guide, GuideKind
from octavo.server import octavo_pb2 as pb
from octavo.server.generation_flags import define_generation_flags, sampling
from octavo.server.main import main
from octavo.server.response_flags import define_response_flags, set_response_flags

from .harness import eventually, running


def sampling_of(*line: str) -> pb.Sampling:
    values = flags.FlagValues()
    define_generation_flags(values)
    values(["-", *line])
    return sampling(values)


def response_of(*line: str) -> pb.GenerateRequest:
    values = flags.FlagValues()
    flags.DEFINE_bool("json", True, "", flag_values=values)
    define_response_flags(values)
    values(["-", *line])
    request = pb.GenerateRequest()
    set_response_flags(values, request)
    return request


def test_every_field_of_sampling_has_a_flag() -> None:
    line = ["--max_tokens=7", "--min_tokens=0", "--temperature=0", "--top_k=-1", "--top_p=0.5"]
    line += ["--min_p=0.25", "--seed=0", "--noignore_eos", "--include_stop"]
    line += ["--repetition_penalty=1.5", "--frequency_penalty=-1", "--presence_penalty=0"]
    line += ["--logit_bias=5:-100,6:0.5", "--stop_token_ids=1,2", "--banned_token_ids=3"]
    line += ["--allowed_token_ids=4,5", "--stop=a,b", "--stop=\n", "--stop=é"]
    sent = sampling_of(*line)
    assert sent == pb.Sampling(
        max_tokens=7,
        min_tokens=0,
        temperature=0,
        top_k=-1,
        top_p=0.5,
        min_p=0.25,
        seed=0,
        ignore_eos=False,
        include_stop=True,
        repetition_penalty=1.5,
        frequency_penalty=-1,
        presence_penalty=0,
        logit_bias={5: -100, 6: 0.5},
        stop_token_ids=[1, 2],
        banned_token_ids=[3],
        allowed_token_ids=pb.TokenIds(ids=[4, 5]),
        stop=["a,b", "\n", "é"],
    )
    set_names = {field.name for field, _ in sent.ListFields()}
    all_names = {field.name for field in pb.Sampling.DESCRIPTOR.fields}
    assert all_names - set_names == {"n", "guide"}  # tested below


def test_what_is_not_given_is_not_sent() -> None:
    """Or the documented default would be the client's and not the server's."""
    assert sampling_of() == pb.Sampling()
    assert response_of() == pb.GenerateRequest()


def test_every_response_option_has_a_flag() -> None:
    line = ["--n=3", "--logprobs", "--prompt_logprobs", "--top_logprobs=5", "--echo"]
    line += ["--prompt_top_logprobs=0", "--noskip_special_tokens", "--max_prompt_tokens=-1"]
    line += ["--truncation_side=right"]
    sent = response_of(*line)
    assert sent == pb.GenerateRequest(
        sampling=pb.Sampling(n=3),
        response=pb.ResponseOptions(
            logprobs=True,
            prompt_logprobs=True,
            skip_special_tokens=False,
            top_logprobs=5,
            prompt_top_logprobs=0,
            echo=True,
        ),
        truncation=pb.Truncation(max_prompt_tokens=-1, side=pb.TRUNCATION_SIDE_RIGHT),
    )
    set_names = {field.name for field, _ in sent.response.ListFields()}
    all_names = {field.name for field in pb.ResponseOptions.DESCRIPTOR.fields}
    # Usage per delta is nothing that a command could show.
    assert all_names - set_names == {"continuous_usage"}


def test_every_kind_of_guide_has_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "schema"
    file.write_text('{"const": "é"}', encoding="utf-8")
    cases = {
        "--json_schema={}": pb.Guide(json_schema="{}"),
        f"--json_schema=@{file}": pb.Guide(json_schema='{"const": "é"}'),
        "--json_object": pb.Guide(json_object=True),
        "--regex=@a+": pb.Guide(regex="@a+"),
        "--choice=a,b --choice=c": pb.Guide(choice=pb.Choices(texts=["a,b", "c"])),
        f"--grammar=@{file}": pb.Guide(grammar='{"const": "é"}'),
    }
    for line, guide in cases.items():
        assert sampling_of(*line.split()).guide == guide, line
    kinds = {str(guide.WhichOneof("kind")) for guide in cases.values()}
    assert kinds == {field.name for field in pb.Guide.DESCRIPTOR.fields}


BAD_LINES = {
    "--logit_bias=5": "--logit_bias has '5'; it must be ID:BIAS",
    "--logit_bias=a:1": "--logit_bias has 'a:1'; it must be ID:BIAS",
    "--logit_bias=-1:1": "--logit_bias has '-1:1'; it must be ID:BIAS",
    "--logit_bias=1:1,1:2": "--logit_bias has 1 twice; it must have each id once",
    "--allowed_token_ids=x": "--allowed_token_ids is x; it must be whole numbers",
    "--banned_token_ids=-1": "--banned_token_ids has -1; it must be a token id, 0 or more",
    "--max_tokens=9223372036854775808": "--max_tokens is 9223372036854775808; it must be in [-(",
    "--stop=\udcff": "--stop is '\\udcff'; it must be UTF-8",
    "--choice=\udcff": "--choice is '\\udcff'; it must be UTF-8",
    "--regex=\udcff": "--regex is '\\udcff'; it must be UTF-8",
    "--regex=a --choice=b": "--regex and --choice are given; give one of them",
    "--json_schema=@/no/such": "--json_schema is @/no/such, which cannot be read: No such file or",
    "--n=2": "--n goes with --json",
    "--n=0": "--n goes with --json",
    "--top_logprobs=1": "--top_logprobs goes with --json",
    "--truncation_side=left": "--truncation_side goes with --max_prompt_tokens",
    "--truncation_side=up --max_prompt_tokens=1": "--truncation_side is 'up'; it must be one of",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_what_cannot_be_sent_is_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--server=localhost:1", "--prompt=a", *line.split(" ")]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith(f"octavo generate: error: {BAD_LINES[line]}")
    assert errors.count("\n") == 1


def test_a_file_that_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grammar"
    file.write_bytes(b"\xff")
    line = ["generate", "--server=localhost:1", "--prompt=a", f"--grammar=@{file}"]
    assert main(line) == 2
    assert capsys.readouterr().err.startswith(
        f"octavo generate: error: --grammar is @{file}, which is no UTF-8: "
    )


async def run_line(
    capsys: pytest.CaptureFixture[str], *line: str, **model_facts: Any
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `octavo` against a fake server."""
    async with running(tokens_per_step=3, model_facts=model_facts) as at:
        command = asyncio.create_task(
            asyncio.to_thread(main, [*line, f"--server=127.0.0.1:{at.port}"])
        )
        await eventually(lambda: bool(at.engine.submitted) or command.done())
        await at.run_to_end()
        return (await command, *capsys.readouterr())


def test_json_of_several_choices(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "--json", "--prompt_ids=65,66,67", "--n=2", "--max_tokens=3", "--stop=BC"]
    line += [
        "--echo",
        "--logprobs",
        "--top_logprobs=2",
        "--prompt_logprobs",
        "--max_prompt_tokens=2",
    ]
    line += ["--prompt_top_logprobs=1"]
    code, out, errors = asyncio.run(run_line(capsys, *line, fingerprint="f00d"))
    assert (code, errors) == (0, "")
    shown = json.loads(out)
    del shown["request_id"]
    assert shown == {
        "choices": [
            {
                "text": "",
                "token_ids": [66, 67],
                "finish_reason": "stop",
                "stop_token_id": None,
                "stop": "BC",
                "logprobs": [0, -1],
                "top_logprobs": [[[0, 0], [1, -0.03125]], [[1, -1], [2, -1.03125]]],
            },
            {
                "text": "C",
                "token_ids": [67, 66, 67],
                "finish_reason": "stop",
                "stop_token_id": None,
                "stop": "BC",
                "logprobs": [0, -1, -2],
                "top_logprobs": [
                    [[0, 0], [1, -0.03125]],
                    [[1, -1], [2, -1.03125]],
                    [[2, -2], [3, -2.03125]],
                ],
            },
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 5, "cached_tokens": 2},
        "timings": {"queue_s": 0.25, "ttft_s": 0.5, "e2e_s": 2.0},
        "num_preemptions": 6,
        "prompt_token_ids": [66, 67],
        "prompt_text": "BC",
        "prompt_logprobs": [-1],
        "prompt_top_logprobs": [[[1, -1]]],
        "truncated_tokens": 1,
        "fingerprint": "f00d",
    }


def test_text_with_echo_and_a_stop_string(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "--prompt_ids=65,66,67", "--echo", "--max_tokens=9", "--stop=C"]
    code, out, errors = asyncio.run(run_line(capsys, *line))
    assert (code, out) == (0, "ABCAB\n")
    assert "ended by stop at 'C'" in errors


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--logit_bias=1:101", "--logit_bias[1] is 101.0; it must be in"),
        ("--logit_bias=99999:1", "--logit_bias is 99999; it must be of token ids in"),
        ("--regex=(", "--regex is '('; it must be one that can be followed: no end"),
        ("--stop=", "--stop[0] is 0 characters long; it must be"),
        ("--max_prompt_tokens=0", "--max_prompt_tokens is 0; it must be -1 or in"),
        ("--min_tokens=-1", "--min_tokens is -1; it must be in"),
    ],
)
def test_what_the_server_refuses_names_the_flag(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_guide(guide: Guide) -> None:
        assert guide == Guide(kind=GuideKind.REGEX, text="(")
        raise ValueError("no end")

    line = ["generate", "--prompt=a", flag]
    code, out, errors = asyncio.run(run_line(capsys, *line, check_guide=check_guide))
    assert (code, out) == (2, "")
    assert errors.startswith(f"octavo generate: error: {said}")


def test_chat_has_the_same_sampling_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    code, out, _ = asyncio.run(run_line(capsys, "chat", "--stop=lo", "--max_tokens=50"))
    assert code == 0
    assert "<user>hel\n" in out

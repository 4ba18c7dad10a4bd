"""The flags that size an engine, and --deterministic, which changes a default."""

import pytest
from absl import flags

from octavo.configs.engine_config import EngineConfig
from octavo.server.engine_flags import ALL_FIELDS, define_engine_flags, model_options
from octavo.server.main import main


def engine_of(*line: str) -> EngineConfig:
    values = flags.FlagValues()
    define_engine_flags(values, ALL_FIELDS)
    values(["-", *line])
    return model_options(values, ALL_FIELDS).engine


def test_defaults_are_those_of_the_config() -> None:
    assert engine_of() == EngineConfig()


@pytest.mark.parametrize(
    ("line", "chunk"),
    [
        ([], 32),
        (["--page_size=64"], 64),
        (["--page_size=24"], 48),
        (["--page_size=5"], 35),
        (["--prefill_chunk_tokens=128"], 128),
        (["--prefill_chunk_tokens=256"], 256),  # its default without the flag, but given
    ],
)
def test_a_deterministic_chunk_is_small_unless_it_is_given(line: list[str], chunk: int) -> None:
    """Every step pays for a whole chunk."""
    config = engine_of("--deterministic", *line)
    assert config.deterministic
    assert config.prefill_chunk_tokens == chunk


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_commands_that_load_a_model_have_what_decides_where_and_how_it_runs(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    printed = capsys.readouterr().out
    for flag in ("--[no]deterministic", "--attention", "--tensor_parallel_size"):
        assert flag in printed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--prefill_chunk_tokens=40"], "--prefill_chunk_tokens is 40; with deterministic it must"),
        (["--inter_token_target_ms=50"], "--inter_token_target_ms is 50.0; with deterministic"),
        (["--max_num_batched_tokens=40"], "--max_num_batched_tokens is 40; with deterministic"),
        (["--page_size=0"], "--page_size is 0; it must be a whole number in [1, 1024]"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    line: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--deterministic", *line]) == 2
    assert words in capsys.readouterr().err


def test_a_server_elsewhere_decides_for_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--server=h:1", "--prompt=x", "--deterministic"]) == 2
    assert "--deterministic is for a model in this process" in capsys.readouterr().err

"""The long-prompt benchmark against a server of fake steps: what it measures, prints and draws."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from octavo.bench import long_prompt
from octavo.bench.scatter_plot import Axis, scatter_svg
from octavo.server.command_line import run_command
from tests.server import processes


def test_measures_each_target_on_a_server_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def command(values: Any) -> list[str]:
        # What follows are flags of `octavo serve`; the fake server takes none.
        commands.append([*processes.fake_server_command(), "--"])
        return commands[-1]

    monkeypatch.setattr(long_prompt, "server_command", command)
    plot = tmp_path / "curve.svg"
    line = [
        "--targets_ms=none,50",
        "--chats=2",
        "--alone_s=1",
        "--long_tokens=64",
        "--chat_tokens=8",
        "--json",
    ]
    assert run_command(long_prompt.COMMAND, [*line, f"--plot={plot}"]) == 0
    assert [words[words.index("--") + 1 :] for words in commands] == [
        [],
        ["--inter_token_target_ms=50.0"],
    ]
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    assert [each["target_ms"] for each in outcomes] == [None, 50.0]
    for each in outcomes:
        # The fake server's steps take 20 ms, whatever runs.
        assert 15 < each["itl_p50_ms"] < 100
        assert each["itl_p99_ms"] >= each["itl_p50_ms"]
        assert each["itl_ratio"] == each["beside_p99_ms"] / each["itl_p99_ms"]
        assert each["solo_ttft_ms"] > 1
    assert len(_circles(plot.read_text())) == 2


def _circles(svg: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall("{http://www.w3.org/2000/svg}circle")


def test_a_plot_is_xml_with_its_points_in_place() -> None:
    """Names may hold what XML does not allow; a larger value is further up and to the right."""
    svg = scatter_svg(
        "a < b",
        Axis(title="x", limit=9.0),
        Axis(title="y"),
        [(1.0, 1.0, "<&>"), (2.0, 3.0, "other")],
    )
    first, second = _circles(svg)
    assert float(first.attrib["cx"]) < float(second.attrib["cx"])
    assert float(first.attrib["cy"]) > float(second.attrib["cy"])
    assert "<&>" in "".join(ElementTree.fromstring(svg).itertext())


def test_refuses_targets_that_are_no_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(long_prompt.COMMAND, ["--targets_ms=fast"]) == 2
    assert "--targets_ms has 'fast'; it must be numbers or none" in capsys.readouterr().err

"""Building divides the memory, and refuses what can never be before it loads anything."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine import build

from .conftest import Model


class _Planned(Exception):
    """Says how many bytes are left for pages, and ends the building there."""


@pytest.mark.usefixtures("types_unchecked")  # shapes stand in for arrays while it is planned
def test_slots_and_rule_tables_are_counted(tiny_model: Model, monkeypatch: pytest.MonkeyPatch):
    """Per slot: counts and a mask of 320 ids, 300 biases, a row and a page table."""

    def plan(*_: object, free_bytes: Callable[[], int], **__: object) -> int:
        raise _Planned(free_bytes())

    def nothing(*_: object) -> SimpleNamespace:
        return SimpleNamespace(temp_size_in_bytes=0, generated_code_size_in_bytes=0)

    monkeypatch.setattr(build, "compile_step", nothing)
    monkeypatch.setattr(build, "_memory_of", nothing)
    monkeypatch.setattr(build.kv_budget, "num_pages", plan)

    def left_bytes(max_num_seqs: int) -> int:
        config = EngineConfig(
            dtype="float32", max_num_seqs=max_num_seqs, device_memory_bytes=10_000_000
        )
        with pytest.raises(_Planned) as planned:
            tiny_model.build(config)
        return planned.value.args[0]

    per_slot = 2 * 320 + 4 * 10 + 2 * 4 * 300
    assert left_bytes(2) - left_bytes(15) >= 13 * per_slot


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_model_len": 100_000}, "max_model_len is 100000; it must be at most "),
        ({"host_kv_bytes": 1}, "host_kv_bytes is 1; it must be 0 or at least "),
        ({"tensor_parallel_size": 4096}, "tensor_parallel_size is 4096; it must be at most "),
    ],
)
def test_what_no_memory_changes_is_refused_before_weights_are_read(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch, config: dict[str, int], message: str
):
    def load(*_: object) -> None:
        pytest.fail("it waited for the weights")

    monkeypatch.setattr(build, "load_decoder", load)
    with pytest.raises(ValueError, match=message):
        tiny_model.build(EngineConfig(**config))

"""EngineConfig: every bound holds, and every refusal names the field, its value and the bound."""

import dataclasses
import math
from typing import Any

import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.configs.scheduling_config import SchedulingConfig

# The suite checks annotations at run time, and would refuse a wrong type before the record does.
pytestmark = pytest.mark.usefixtures("types_unchecked")

# Field, lowest and highest value; the fields marked True may be None.
BOUNDS = [
    ("tensor_parallel_size", 1, 4096, False),
    ("max_num_seqs", 1, 4096, False),
    ("prefill_chunk_tokens", 1, 65_536, False),
    ("max_num_batched_tokens", 2, 131_072, True),
    ("max_model_len", 2, 2**24, True),
    ("page_size", 1, 1024, False),
    ("num_pages", 2, 2**24, True),
    ("kv_cache_bytes", 1, 2**50, True),
    ("device_memory_bytes", 1, 2**50, True),
    ("host_kv_bytes", 0, 2**50, False),
    ("max_stop_ids", 1, 256, False),
    ("seed", 0, 2**64 - 1, False),
]


def config(**changes: Any) -> EngineConfig:
    """A config in which any one field may take any of its legal values."""
    roomy = {"max_num_seqs": 1, "prefill_chunk_tokens": 1} | changes
    return EngineConfig(**roomy)


@pytest.mark.parametrize(("name", "low", "high", "optional"), BOUNDS)
def test_the_ends_of_the_range_are_legal(name: str, low: int, high: int, optional: bool) -> None:
    for value in [low, high, *([None] if optional else [])]:
        assert getattr(config(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "low", "high", "optional"), BOUNDS)
def test_all_else_is_refused_by_name(name: str, low: int, high: int, optional: bool) -> None:
    """NaN passes `value < low or value > high`; True and 2.0 pass a bare comparison."""
    others = [math.nan, math.inf, -math.inf, 2.0, 2.5, True, "2", *([] if optional else [None])]
    for value in [low - 1, high + 1, *others]:
        with pytest.raises(ValueError, match=name) as caught:
            config(**{name: value})
        message = str(caught.value)
        assert message.startswith(f"{name} is {value!r}; ")
        assert f"[{low}, {high}]" in message


def test_every_field_is_in_the_table() -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    others = {"dtype", "attention", "deterministic", "scheduling"}
    assert {name for name, *_ in BOUNDS} | others == fields


@pytest.mark.parametrize("value", ["float16", "", None, 32])
def test_dtype_is_one_of_a_list(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^dtype is .*'bfloat16', 'float32'"):
        config(dtype=value)


@pytest.mark.parametrize("value", ["pallas", "", None, 1])
def test_attention_is_one_of_a_list(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^attention is .*'auto', 'reference', 'tpu', 'gpu'"):
        config(attention=value)


def test_the_pool_has_one_size() -> None:
    with pytest.raises(ValueError, match=r"num_pages is 8 and kv_cache_bytes is 4096; .*at most"):
        config(num_pages=8, kv_cache_bytes=4096)
    with pytest.raises(ValueError, match=r"kv_cache_bytes is 1 and device_memory_bytes is 2; "):
        config(kv_cache_bytes=1, device_memory_bytes=2)


def test_host_memory_needs_the_prefix_cache() -> None:
    """Without it no page ever goes there, and the transfers would be compiled for nothing."""
    without = SchedulingConfig(prefix_cache=False)
    with pytest.raises(ValueError, match=r"host_kv_bytes is 1 and prefix_cache is False; "):
        config(host_kv_bytes=1, scheduling=without)
    assert config(host_kv_bytes=0, scheduling=without).host_kv_bytes == 0


def test_the_budget_leaves_room_for_prompts() -> None:
    """With budget == slots a full batch would starve every waiting prompt."""
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 8; .*exceed max_num_seqs, 8"):
        config(max_num_seqs=8, max_num_batched_tokens=8)
    assert config(max_num_seqs=8, max_num_batched_tokens=9).token_budget == 9


def test_the_budget_defaults_to_a_full_batch_and_a_whole_chunk() -> None:
    assert EngineConfig(max_num_seqs=32, prefill_chunk_tokens=256).token_budget == 288


def test_a_config_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().page_size = 8


def test_a_deterministic_engine_computes_whole_chunks():
    """One executable, so no chunk may be cut: neither by a page, a budget nor a target."""
    config = EngineConfig(deterministic=True, prefill_chunk_tokens=32, host_kv_bytes=1 << 20)
    assert config.token_budget == 64
    no_cache = SchedulingConfig(prefix_cache=False)
    EngineConfig(deterministic=True, host_kv_bytes=1 << 20, scheduling=no_cache)
    with pytest.raises(ValueError, match="deterministic is 1; it must be True or False"):
        EngineConfig(**{"deterministic": 1})
    with pytest.raises(
        ValueError, match=r"prefill_chunk_tokens is 40; .*multiple of page_size, 16"
    ):
        EngineConfig(deterministic=True, prefill_chunk_tokens=40)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 63; .*at least 64"):
        EngineConfig(deterministic=True, prefill_chunk_tokens=32, max_num_batched_tokens=63)
    EngineConfig(deterministic=True, prefill_chunk_tokens=32, max_num_batched_tokens=64)
    target = SchedulingConfig(inter_token_target_ms=50.0)
    with pytest.raises(ValueError, match=r"inter_token_target_ms is 50\.0; .*must be None"):
        EngineConfig(deterministic=True, scheduling=target)

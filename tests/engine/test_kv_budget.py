import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine.kv_budget import MAX_POOL_TOKENS, host_pages, host_pool_bytes, num_pages
from tests.models.tiny_checkpoints import tiny_config

PLENTY = 2**50


def pages(
    *, bytes_per_page: int = 1000, free_bytes: int = PLENTY, max_position: int = 256, **config: int
) -> int:
    return num_pages(
        EngineConfig(**config),
        tiny_config(max_position=max_position),
        bytes_per_page=bytes_per_page,
        free_bytes=lambda: free_bytes,
    )


def test_what_the_config_says_goes():
    assert pages(num_pages=17, free_bytes=0) == 17
    assert pages(kv_cache_bytes=17_999, free_bytes=0) == 17


def test_memory_is_not_measured_where_the_config_says_it():
    def measure() -> int:
        raise AssertionError("nobody needs to know")

    config = EngineConfig(num_pages=17)
    assert num_pages(config, tiny_config(), bytes_per_page=1000, free_bytes=measure) == 17


def test_a_little_more_or_less_free_memory_gives_the_same_pool():
    """Else the next start finds none of its programs in the cache: pages are a compiled shape."""
    gib = 2**30
    assert {host_pool_bytes(free, 1) for free in (16 * gib, 21 * gib, 22 * gib + 47)} == {4 * gib}
    assert host_pool_bytes(16 * gib - 1, 1) == 2 * gib
    assert [host_pool_bytes(free, 1) for free in (0, 3, 4)] == [0, 0, 1]


@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_devices_that_share_the_host_share_what_one_would_take(num_devices: int):
    assert host_pool_bytes(2**34, num_devices) == 2**32 // num_devices


def test_free_memory_bounds_what_the_config_leaves_open():
    assert pages(free_bytes=17_999) == 17


@pytest.mark.parametrize(
    ("max_model_len", "per_slot"), [(None, 16), (256, 16), (255, 16), (241, 16), (240, 15), (16, 1)]
)
def test_never_more_than_the_slots_can_use(max_model_len: int | None, per_slot: int):
    """Every slot at the longest context, and page 0; 256 tokens are 16 pages of 16."""
    config = {} if max_model_len is None else {"max_model_len": max_model_len}
    assert pages(max_num_seqs=3, page_size=16, **config) == 3 * per_slot + 1


def test_a_context_longer_than_the_model_knows_is_refused():
    with pytest.raises(ValueError, match="max_model_len is 10000; it must be at most 256"):
        pages(max_num_seqs=3, page_size=16, max_model_len=10_000)


def test_places_of_the_pool_fit_int32():
    """Failure case 9.5: page * page_size + offset must not wrap on the device, nor what follows.

    Tokens that are padding have places behind the pool; one that wrapped would be in it.
    """
    most = pages(max_num_seqs=4096, page_size=1024, max_position=2**24)
    assert most * 1024 <= MAX_POOL_TOKENS
    largest_step = EngineConfig(max_num_seqs=4096, prefill_chunk_tokens=65_536).token_budget
    assert MAX_POOL_TOKENS + largest_step <= 2**31
    with pytest.raises(ValueError, match=r"gives 2097152 pages of 1024 tokens; .* most 2"):
        pages(num_pages=2**21, page_size=1024)
    assert pages(num_pages=2**21 - 1024, page_size=1024) == 2**21 - 1024


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("kv_cache_bytes is 1999, which gives 1 pages", {"kv_cache_bytes": 1999}),
        ("kv_cache_bytes is 999, which gives 0 pages", {"kv_cache_bytes": 999}),
        ("memory that is free for the KV pool gives 1 pages", {"free_bytes": 1999}),
        ("memory that is free for the KV pool gives 0 pages", {"free_bytes": 0}),
        ("memory that is free for the KV pool gives 0 pages", {"free_bytes": -5000}),
    ],
)
def test_too_little_is_refused_and_named(source: str, settings: dict[str, int]):
    with pytest.raises(ValueError, match=f"{source} of 1000 bytes; it must give at least 2"):
        pages(**settings)


@pytest.mark.parametrize(("free_bytes", "least"), [(1999, 10_001), (0, 12_000), (-5000, 17_000)])
def test_a_limit_that_is_too_low_says_what_is_enough(free_bytes: int, least: int):
    """Free is what the limit leaves beside all the rest, and may be negative."""
    with pytest.raises(ValueError, match=f"bytes is 10000; it must be at least {least}: "):
        pages(device_memory_bytes=10_000, free_bytes=free_bytes)
    assert pages(device_memory_bytes=least, free_bytes=free_bytes + least - 10_000) == 2


def test_host_memory_holds_whole_pages():
    assert host_pages(EngineConfig(host_kv_bytes=0), 1000) == 0
    assert host_pages(EngineConfig(host_kv_bytes=1000), 1000) == 1
    assert host_pages(EngineConfig(host_kv_bytes=17_999), 1000) == 17
    with pytest.raises(ValueError, match="host_kv_bytes is 999; it must be 0 or at least 1000"):
        host_pages(EngineConfig(host_kv_bytes=999), 1000)


def test_host_memory_is_shared_by_the_devices():
    """Fails if each of them takes all of it: eight would pin eight times what was allowed."""
    assert host_pages(EngineConfig(host_kv_bytes=17_999, tensor_parallel_size=8), 1000) == 2
    with pytest.raises(ValueError, match="host_kv_bytes is 7999; it must be 0 or at least 8000"):
        host_pages(EngineConfig(host_kv_bytes=7999, tensor_parallel_size=8), 1000)

"""What the TPU kernels are told before they run: layouts, budgets, work lists, walks, bytes.

What would break these: a product of sizes that leaves int32, an item that is lost or walked twice,
a shape that is accepted and does not fit, a refusal that does not say what to change.
"""

import itertools
import re
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.kv_budget import MAX_POOL_TOKENS
from octavo.pallas_kernels.backend import AttentionShape, KVShape
from octavo.pallas_kernels.chunk_tokens import Segments
from octavo.pallas_kernels.tpu_backend import TpuBackend
from octavo.pallas_kernels.tpu_budget import (
    SMEM_BYTES,
    VMEM_BUDGET_BYTES,
    Blocking,
    choose_blocking,
    table_fits_smem,
    vmem_bytes,
)
from octavo.pallas_kernels.tpu_cache import (
    HeadLayout,
    pack_tokens,
    page_and_offset,
)
from octavo.pallas_kernels.tpu_leaves import group_of_row, token_of_row
from octavo.pallas_kernels.tpu_tiles import TileWalk
from octavo.pallas_kernels.tpu_work import TpuWork, decode_work, prefill_work, stable_partition

from .tpu_pages import unpack
from .tpu_traffic import item_traffic

BACKEND = TpuBackend()
LLAMA_8B = AttentionShape(
    kv=KVShape(kv_heads=8, head_dim=128, page_size=128, dtype="bfloat16"),
    q_heads=32,
    rows=256,
    chunk=2048,
    segments=8,
    pages_per_seq=1024,
)


def _with_kv(**changes: Any) -> AttentionShape:
    return replace(LLAMA_8B, kv=replace(LLAMA_8B.kv, **changes))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
def test_pages_hold_what_was_packed_and_take_the_bytes_that_are_told(kv_heads: int, head_dim: int):
    shape = KVShape(kv_heads=kv_heads, head_dim=head_dim, page_size=16, dtype="bfloat16")
    layer = BACKEND.allocate(shape, 3)
    assert layer.pages.nbytes == 3 * BACKEND.bytes_per_page(shape)
    assert not np.asarray(layer.pages).any()
    rng = np.random.default_rng(0)
    k, v = jnp.asarray(rng.normal(size=(2, 48, kv_heads, head_dim)), jnp.bfloat16)
    tokens = pack_tokens(k, v)
    assert tokens.shape[1:] == layer.pages.shape[2:]
    packed = replace(layer, pages=tokens.reshape(layer.pages.shape))
    for found, expected in zip(unpack(packed, kv_heads, head_dim), (k, v), strict=True):
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def test_heads_that_fill_their_lanes_take_no_padding():
    for kv_heads, head_dim in [(1, 128), (3, 128), (8, 128), (8, 64), (2, 64), (2, 256)]:
        shape = KVShape(kv_heads=kv_heads, head_dim=head_dim, page_size=64, dtype="bfloat16")
        assert BACKEND.bytes_per_page(shape) == 64 * kv_heads * 2 * head_dim * 2


def test_every_place_of_a_large_pool_is_found():
    """A million pages, and the largest pool there may be: past 2^31 elements from page 2 on."""
    most = MAX_POOL_TOKENS
    for num_pages, page_size in [(2**20, 128), (2**20, 1024), (most, 1), (most // 16, 16)]:
        places = np.array([0, 1, page_size - 1, page_size, num_pages * page_size // 2 + 1])
        places = np.append(places, num_pages * page_size - 1)
        found = [page_and_offset(jnp.int32(place), page_size) for place in places]
        page, offset = np.array(found).T
        np.testing.assert_array_equal(page, places // page_size)
        np.testing.assert_array_equal(offset, places % page_size)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (_with_kv(dtype="float32"), "dtype float32: must be bfloat16"),
        (_with_kv(head_dim=320), "head_dim 320: must be in"),
        (_with_kv(page_size=48), "page_size 48: must be a power of two"),
        (_with_kv(page_size=2048), "page_size 2048: must be a power of two"),
        (replace(LLAMA_8B, q_heads=33), "q_heads 33: must be a multiple of kv_heads 8"),
        (replace(LLAMA_8B, q_heads=136), "q_heads 136: at most 16"),
        (replace(LLAMA_8B, rows=4096), "rows 4096: must be below 4096"),
        (replace(LLAMA_8B, segments=4096), "segments 4096: must be below 4096"),
        (replace(LLAMA_8B, pages_per_seq=2**17), "pages_per_seq 131072: at most"),
        (
            AttentionShape(
                kv=KVShape(kv_heads=64, head_dim=256, page_size=1024, dtype="bfloat16"),
                q_heads=64,
                rows=1,
                chunk=16,
                segments=1,
                pages_per_seq=8,
            ),
            "kv_heads 64 of head_dim 256 with page_size 1024: .* bytes of VMEM, at most",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_by_name_value_and_bound(shape: AttentionShape, reason: str):
    refusal = BACKEND.refusal(shape)
    assert refusal is not None
    assert re.match(reason, refusal), refusal


def test_the_ranges_of_the_contract_are_not_refused():
    for kv_heads, group, head_dim, page_size in itertools.product(
        (1, 2, 3, 4, 8), (1, 2, 3, 7, 9, 16), (64, 80, 96, 128, 256), (16, 32, 64, 128, 256)
    ):
        shape = replace(
            LLAMA_8B,
            kv=KVShape(kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype="bfloat16"),
            q_heads=kv_heads * group,
        )
        assert BACKEND.refusal(shape) is None, shape
        heads = HeadLayout(kv_heads, head_dim)
        for tokens in (1, 2, 16, 100, 2048):
            blocking = choose_blocking(heads, group, page_size, tokens)
            assert (blocking.tile == 1) == (tokens == 1)
            assert blocking.tile < 2 * tokens
            assert blocking.tile & (blocking.tile - 1) == 0
            assert blocking.block % page_size == 0
            assert blocking.buffers >= 2
            assert vmem_bytes(blocking, heads, group) <= VMEM_BUDGET_BYTES


def test_a_page_table_is_in_scalar_memory_where_it_fits():
    assert table_fits_smem(256, 512)
    assert not table_fits_smem(256, 1024)  # 1 MiB, which is all there is
    assert SMEM_BYTES - 64 * 1024 < 4 * 250_000
    assert not table_fits_smem(1, 250_000)
    lens = jnp.ones(256, jnp.int32)
    assert decode_work(jnp.zeros((256, 512), jnp.int32), lens).page_table.shape == (256 * 512,)
    assert decode_work(jnp.zeros((256, 1024), jnp.int32), lens).page_table.shape == (256, 1, 1024)


def test_a_stable_partition_keeps_both_orders():
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 256):
        is_first = rng.integers(0, 2, size).astype(bool)
        expected = [*np.flatnonzero(is_first), *np.flatnonzero(~is_first)]
        np.testing.assert_array_equal(stable_partition(jnp.asarray(is_first)), expected)


def _tiles(work: TpuWork, blocking: Blocking, page_size: int, window: int | None = None):
    """Every tile of a work list, in order: (tile, blocks, pages of each block), as numbers."""
    walk = TileWalk(work.row, work.start, work.q_len, work.kv_len, blocking, page_size, window)
    found = []
    for item in range(work.row.shape[0]):
        for index in range(int(walk.num_tiles(jnp.int32(item)))):
            tile = walk.tile(jnp.int32(item), jnp.int32(index))
            numbers = {name: int(value) for name, value in vars(tile).items()}
            first, end = (int(n) for n in walk.blocks(tile)) if numbers["end_key"] > 0 else (0, 0)
            pages = [
                tuple(int(n) for n in walk.pages(tile, jnp.int32(block)))
                for block in range(first, end)
            ]
            found.append((item, numbers, pages))
    return found


def test_every_token_of_a_chunk_is_in_one_tile():
    """Also that of padding, and none twice."""
    segments = Segments(
        jnp.zeros((5, 4), jnp.int32),
        jnp.asarray([50, 0, 33, 7, 0], jnp.int32),
        jnp.asarray([20, 0, 1, 7, 0], jnp.int32),
    )
    for chunk in (28, 29, 64):
        work = prefill_work(segments, chunk)
        tiles = _tiles(work, Blocking(tile=8, block=128, buffers=2), 16)
        covered = [
            t for _, tile, _ in tiles for t in range(tile["start"], tile["start"] + tile["count"])
        ]
        assert sorted(covered) == list(range(chunk))
        assert int(work.num_live[0]) == 3
        for item, tile, pages in tiles:
            if item < 3:
                segment = tile["row"]
                begin = [0, 20, 20, 21, 28][segment]
                kv_len, q_len = int(segments.kv_lens[segment]), int(segments.q_lens[segment])
                assert tile["position"] == kv_len - q_len + tile["start"] - begin
                assert pages[-1][1] == -(-tile["end_key"] // 16)
            else:
                assert not pages


def test_a_walk_reads_the_pages_of_its_window_and_no_others():
    lens = jnp.asarray([1, 0, 15, 16, 17, 127, 128, 129, 300], jnp.int32)
    table = jnp.zeros((9, 20), jnp.int32)
    for window in (None, 1, 2, 16, 17, 45, 128, 1000):
        for item, tile, pages in _tiles(
            decode_work(table, lens), Blocking(tile=1, block=128, buffers=2), 16, window
        ):
            kv_len = int(lens[tile["row"]])
            first_key = 0 if window is None else max(0, kv_len - window)
            seen = {position // 16 for position in range(first_key, kv_len)}
            assert seen == {page for first, end in pages for page in range(first, end)}, item
            for first, end in pages:
                assert first < end
                assert first // 8 == (end - 1) // 8  # in one block


def test_a_context_of_two_billion_tokens_is_walked_without_overflow():
    """Far more than any: every number on the way stays in int32."""
    work = decode_work(jnp.zeros((1, 4), jnp.int32), jnp.asarray([2**31 - 2**10], jnp.int32))
    walk = TileWalk(
        work.row,
        work.start,
        work.q_len,
        work.kv_len,
        Blocking(tile=1, block=1024, buffers=2),
        16,
        64,
    )
    tile = walk.tile(jnp.int32(0), jnp.int32(0))
    first, end = (int(n) for n in walk.blocks(tile))
    assert (first, end) == (2**21 - 2, 2**21 - 1)
    first, end = (int(n) for n in walk.pages(tile, jnp.int32(end - 1)))
    assert (first, end) == (2**27 - 2**6 - 4, 2**27 - 2**6)


def test_rows_of_a_tile_are_its_tokens_and_query_heads_each_once():
    for tile, pairs in [(1, 1), (1, 8), (2, 1), (8, 2), (64, 2), (16, 8)]:
        row = jnp.arange(2 * pairs * tile)
        tokens, heads = token_of_row(row, tile).tolist(), group_of_row(row, tile).tolist()
        found = zip(tokens, heads, strict=True)
        assert sorted(found) == list(itertools.product(range(tile), range(2 * pairs)))


@pytest.mark.parametrize("window", [None, 100])
def test_traffic_is_what_the_walk_reads(window: int | None):
    kv = KVShape(kv_heads=2, head_dim=128, page_size=16, dtype="bfloat16")
    heads, group = HeadLayout(2, 128), 4
    segments = Segments(
        jnp.zeros((3, 40), jnp.int32),
        jnp.asarray([500, 33, 128], jnp.int32),
        jnp.asarray([200, 1, 128], jnp.int32),
    )
    blocking = choose_blocking(heads, group, 16, 512)
    tiles = _tiles(prefill_work(segments, 512), blocking, 16, window)
    for segment, (kv_len, q_len) in enumerate([(500, 200), (33, 1), (128, 128)]):
        walked = sum(
            end - first for item, tile, pages in tiles if item == segment for first, end in pages
        )
        traffic = item_traffic(
            kv, group, q_len=q_len, kv_len=kv_len, window=window, item_tokens=512
        )
        assert traffic.kv_bytes == walked * 16 * heads.token_bytes


def test_a_decode_row_moves_its_pages_and_no_more():
    """Llama 3.1 8B: no padding, so only the last page is moved beyond what is needed."""
    kv = LLAMA_8B.kv
    full = item_traffic(kv, 4, q_len=1, kv_len=4096, window=None, item_tokens=1)
    assert full.ratio == 1
    one_more = item_traffic(kv, 4, q_len=1, kv_len=4097, window=None, item_tokens=1)
    assert one_more.kv_bytes - full.kv_bytes == BACKEND.bytes_per_page(kv)
    windowed = item_traffic(kv, 4, q_len=1, kv_len=100_000, window=1024, item_tokens=1)
    assert windowed.ratio < 1.15

"""What the GPU kernels compute before they run: who reads what, sizes, refusals, bytes."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.pallas_kernels.backend import LOWEST, AttentionShape, KVShape, Scoring
from octavo.pallas_kernels.chunk_tokens import Segments, chunk_tokens
from octavo.pallas_kernels.gpu_backend import GpuBackend, gpu_backend
from octavo.pallas_kernels.gpu_budget import (
    SHARED_KIB,
    GpuChip,
    decode_plan,
    padded_head_dim,
    prefill_plan,
)
from octavo.pallas_kernels.gpu_copies import PageRing, box_place
from octavo.pallas_kernels.gpu_decode import combine, split_range, stored_heads
from octavo.pallas_kernels.gpu_softmax import base_2, first_seen
from octavo.pallas_kernels.gpu_work import TILE_FIELDS, TILE_TOKENS, max_tiles, prefill_work

from .gpu_traffic import decode_row_traffic, prefill_tile_traffic

H100 = GpuChip(compute_capability=90, num_sms=132)
A100 = GpuChip(compute_capability=80, num_sms=108)
SHAPE = AttentionShape(
    kv=KVShape(kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16"),
    q_heads=32,
    rows=256,
    chunk=2048,
    segments=8,
    pages_per_seq=512,
)


def _int(value: int) -> jnp.ndarray:
    return jnp.int32(value)


@given(
    page_size=st.integers(1, 64).map(lambda n: 8 * n),
    tile=st.sampled_from([32, 64]),
    kv_len=st.integers(1, 5000),
    data=st.data(),
)
def test_boxes_hold_the_tokens_of_their_tile_and_stay_in_the_rows_pages(
    page_size: int, tile: int, kv_len: int, data: st.DataObject
):
    """A box that begins past the last token would read a page-table entry that may be anything."""
    ring = PageRing(page_size, tile, stages=2, width=128, has_tma=True)
    index = data.draw(st.integers(0, (kv_len - 1) // tile))
    for copy in range(ring.copies):
        column, offset = (int(n) for n in box_place(ring, _int(index), copy, _int(kv_len)))
        assert offset % ring.box == 0
        assert offset + ring.box <= page_size
        first = column * page_size + offset
        assert first < kv_len
        wanted = index * tile + copy * ring.box
        assert first == wanted or wanted >= kv_len


@given(
    kv_len=st.integers(0, 40000),
    window=st.none() | st.integers(1, 40000),
    splits=st.integers(1, 64),
    tile=st.sampled_from([32, 64]),
)
def test_splits_read_each_tile_that_is_seen_once(
    kv_len: int, window: int | None, splits: int, tile: int
):
    seen_from = first_seen(_int(kv_len), window)
    reads = np.zeros(40000 // tile + 2, int)
    for split in range(splits):
        first, last = split_range(_int(kv_len), seen_from, _int(split), splits=splits, tile=tile)
        reads[int(first) : max(int(first), int(last))] += 1
    seen = np.zeros_like(reads)
    seen[int(seen_from) // tile : -(-kv_len // tile)] = 1
    np.testing.assert_array_equal(reads, seen)


@given(
    q_lens=st.lists(st.sampled_from([0, 1, 5, 63, 64, 65, 130]), min_size=4, max_size=4),
    chunk=st.sampled_from([520, 527]),
)
def test_tiles_hold_every_token_of_a_chunk_once(q_lens: list[int], chunk: int):
    kv_lens = [count + 7 * index if count else 0 for index, count in enumerate(q_lens)]
    segments = Segments(
        jnp.zeros((len(q_lens), 1), jnp.int32), jnp.array(kv_lens), jnp.array(q_lens)
    )
    tokens = chunk_tokens(segments, chunk)
    found: list[tuple[int, int, bool]] = []
    tiles = np.asarray(prefill_work(segments, chunk).tiles)
    assert len(tiles) == max_tiles(chunk, len(q_lens))
    for values in tiles:
        tile = dict(zip(TILE_FIELDS, values.tolist(), strict=True))
        assert 0 <= tile["tokens"] <= TILE_TOKENS
        for i in range(tile["tokens"]):
            assert len(found) == tile["first_token"] + i
            segment = len(q_lens) if tile["is_padding"] else tile["segment"]
            found.append((segment, tile["first_position"] + i, tile["is_padding"]))
    assert [segment for segment, *_ in found] == tokens.segment_of.tolist()
    for (_, position, is_padding), expected in zip(found, tokens.position_of.tolist(), strict=True):
        assert is_padding or position == expected


@given(st.data())
def test_combining_shares_of_a_row_equals_the_row(data: st.DataObject):
    """Also with shares that are empty, whose results are whatever lay there."""
    splits = data.draw(st.integers(1, 5))
    empty = data.draw(st.lists(st.booleans(), min_size=splits, max_size=splits))
    has_sink = data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    scores, values = 9 * rng.normal(size=(splits, 6)), rng.normal(size=(splits, 6, 64))
    sink = 5 * rng.normal()
    mixed, sums = np.full((1, splits, 1, 1, 64), np.nan), np.full((1, splits, 1, 1), LOWEST)
    numerator, total = np.zeros(64), math.exp(sink) if has_sink else 0.0
    for split in range(splits):
        if not empty[split]:
            weights = np.exp(scores[split])
            mixed[0, split, 0, 0] = weights @ values[split] / weights.sum()
            sums[0, split, 0, 0] = np.log2(weights.sum())
            numerator, total = numerator + weights @ values[split], total + weights.sum()
    sinks = jnp.full((1, 1), sink) if has_sink else None
    found = combine(jnp.float32(mixed), jnp.float32(sums), sinks)
    expected = numerator / total if total else numerator
    np.testing.assert_allclose(found[0, 0, 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
def test_scores_are_in_base_2_and_capped_to_rounding(softcap: float | None):
    products = jnp.linspace(-500, 500, 4001).reshape(1, -1)
    found = base_2(products, Scoring(scale=0.125, softcap=softcap))
    expected = np.asarray(products, np.float64) * 0.125
    if softcap is not None:
        expected = softcap * np.tanh(expected / softcap)
    np.testing.assert_allclose(found, expected * math.log2(math.e), rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_plans_fit_the_chip(capability: int, head_dim: int):
    chip = GpuChip(capability, num_sms=132)
    width = padded_head_dim(head_dim)
    plans = [prefill_plan(chip, width)]
    for rows in (1, 2, 16, 256):
        plan = decode_plan(chip, rows=rows, kv_heads=8, width=width, max_tokens=32768)
        assert plan.splits >= 1
        # A second block for a few rows only would double the traffic of all of them.
        at_once = chip.num_sms * (2 if plan.shared_bytes <= chip.block_bytes(2) else 1)
        assert plan.splits == 1 or plan.splits * rows * 8 <= at_once
        plans.append(plan)
    for plan in plans:
        assert plan.stages >= 2
        assert plan.shared_bytes <= chip.block_bytes(1)
        assert width > 128 or plan.shared_bytes <= chip.block_bytes(2), "blocks don't share a chip"


def test_a_block_that_does_not_share_its_multiprocessor_is_not_counted_twice():
    """Fails if splits are more than run at once: the rest would wait for a second wave."""
    plan = decode_plan(A100, rows=1, kv_heads=2, width=256, max_tokens=32768)
    assert plan.shared_bytes > A100.block_bytes(2)
    assert plan.splits == 108 // 2


def test_splits_are_no_more_than_tiles():
    plan = decode_plan(H100, rows=1, kv_heads=1, width=128, max_tokens=150)
    assert plan.splits == 3


@pytest.mark.parametrize("chip", [A100, H100, GpuChip(100, 148)])
def test_what_models_have_is_not_refused(chip: GpuChip):
    for head_dim, group in itertools.product((64, 80, 96, 128, 256), range(1, 17)):
        kv = dataclasses.replace(SHAPE.kv, head_dim=head_dim)
        shape = dataclasses.replace(SHAPE, kv=kv, q_heads=8 * group)
        assert GpuBackend(chip).refusal(shape) is None


@pytest.mark.parametrize(
    ("chip", "changes", "kv_changes", "message"),
    [
        (H100, {}, {"dtype": "float32"}, "dtype float32: must be bfloat16"),
        (H100, {}, {"head_dim": 257}, r"head_dim 257: must be in \[1, 256\]"),
        (H100, {}, {"page_size": 20}, "page_size 20: must be a multiple of 8"),
        (A100, {}, {"page_size": 24, "head_dim": 64}, "page_size 24: must be a multiple of 16"),
        (H100, {"q_heads": 33}, {}, "q_heads 33: must be a multiple of kv_heads 8"),
        (H100, {"q_heads": 136}, {}, "q_heads 136: at most 16 for each of 8 kv_heads"),
        (H100, {"rows": 70000}, {}, "rows 70000: at most 65535"),
        (GpuChip(75, 40), {}, {}, r"compute_capability 75: must be in \[80, 90, 100\]"),
    ],
)
def test_a_refusal_names_field_value_and_bound(
    chip: GpuChip, changes: dict[str, int], kv_changes: dict[str, int | str], message: str
):
    kv = dataclasses.replace(SHAPE.kv, **kv_changes)
    shape = dataclasses.replace(SHAPE, kv=kv, **changes)
    refusal = GpuBackend(chip).refusal(shape)
    assert refusal is not None
    assert re.match(message, refusal), refusal


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("width", [64, 128, 256])
def test_what_a_decode_block_stores_fills_its_threads(group: int, width: int):
    stored = stored_heads(group, width)
    assert stored * width % 128 == 0
    assert group <= stored <= min(group + 1, 16)


def test_pages_take_what_they_say():
    backend = GpuBackend(H100)
    for head_dim in (64, 80, 128, 256):
        shape = KVShape(kv_heads=3, head_dim=head_dim, page_size=16, dtype="bfloat16")
        pages = backend.allocate(shape, 5)
        assert pages.nbytes == 5 * backend.bytes_per_page(shape)
        assert pages.shape[0] == 5


@pytest.mark.full
def test_a_million_pages():
    """Past 2^31 elements: 4 GiB, written in place at both ends and read back."""
    backend = GpuBackend(H100)
    num_pages = 2**20 + 16
    pages = backend.allocate(
        KVShape(kv_heads=1, head_dim=64, page_size=16, dtype="bfloat16"), num_pages
    )
    assert pages.size > 2**31
    places = jnp.array([16, 16 * num_pages - 1, 16 * num_pages + 2], jnp.int32)
    k = jnp.arange(1.0, 4.0)[:, None, None] * jnp.ones((3, 1, 64))
    pages = jax.jit(backend.write_kv, donate_argnums=0)(pages, k, -k, places)
    written = [pages[1, 0], pages[num_pages - 1, 15]]
    for value, place in enumerate(written, 1):
        np.testing.assert_array_equal(place, [[value] * 64, [-value] * 64])
    assert not pages[0].any()
    assert not pages[num_pages - 1, :15].any()


def test_a_backend_for_a_device_knows_its_chip():
    class Device:
        compute_capability = "10.0"
        core_count = 148

    assert gpu_backend(Device()).chip == GpuChip(100, 148)


def test_traffic_by_hand():
    """Llama 3.1 8B on one H100: 8 kv heads, 32 query heads, heads of 128, pages of 64."""
    shape = {"page_size": 64, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "width": 128}
    plan = decode_plan(H100, rows=256, kv_heads=8, width=128, max_tokens=8192)
    traffic = decode_row_traffic(plan, kv_len=4000, **shape)
    assert plan.splits == 1
    assert traffic.kv_bytes == 4032 * 8 * 2 * 128 * 2  # whole boxes
    assert traffic.other_bytes == 8 * (16 + 4) * 128 * 2
    assert traffic.least_bytes == (4000 * 8 * 2 + 2 * 32) * 128 * 2
    assert traffic.ratio < 1.02

    few = decode_plan(H100, rows=1, kv_heads=8, width=128, max_tokens=8192)
    assert few.splits == 33
    assert decode_row_traffic(few, kv_len=4000, **shape).ratio < 1.2

    windowed = decode_row_traffic(plan, kv_len=4000, window=1000, **shape)
    assert windowed.kv_bytes == (4032 - 2944) * 8 * 2 * 128 * 2

    tile = prefill_tile_traffic(prefill_plan(H100, 128), first_position=1024, **shape)
    # Four blocks of 16 tokens, which end within one box.
    assert tile.kv_bytes == 4 * 1088 * 8 * 2 * 128 * 2

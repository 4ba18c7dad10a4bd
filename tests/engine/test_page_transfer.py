"""Pages move to host memory and back bit for bit, in order with the steps, and touch nothing else.

What would break this: leaves that are taken in another order on the way back, a copy that goes
through floats, padding that writes, a pool that is donated by a reader, or a transfer that does not
depend on the step before it.
"""

import weakref
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from octavo.configs.engine_config import DType
from octavo.engine import packing
from octavo.engine.compilation import compile_events
from octavo.engine.device_state import DeviceState, empty_slots
from octavo.engine.engine import Engine
from octavo.engine.executables import compile_table, trace_export, trace_import
from octavo.engine.executor import DeviceExecutor
from octavo.engine.logit_rules import empty_tables
from octavo.engine.made_up_requests import NOTHING
from octavo.engine.packing import UploadLayout
from octavo.engine.page_transfer import (
    PAGES_PER_TRANSFER,
    TransferKey,
    export_pages,
    import_pages,
    page_spec,
)
from octavo.engine.placement import make_mesh, replicated
from octavo.engine.step_shapes import StepKey
from octavo.engine.token_masks import num_words
from octavo.models.decoder import Decoder, declared_parameters, decoder_from_parameters
from octavo.pallas_kernels.backend import KVLayer
from octavo.pallas_kernels.reference_backend import ReferenceBackend
from octavo.pallas_kernels.reference_cache import ReferencePages
from tests.models.tiny_checkpoints import VOCAB_SIZE

from .conftest import TINY_ENGINE, Model, on_one_device

NUM_PAGES = 41  # 40 to use: five transfers
EVERYWHERE = replicated(make_mesh(jax.local_devices()[:1]))


@pytest.fixture(scope="module")
def decoder(tiny_model: Model) -> Decoder:
    config = tiny_model.checkpoint.config
    declared = declared_parameters(config, "float32")
    parameters = tiny_model.checkpoint.load(declared, on_one_device)
    return decoder_from_parameters(config, "float32", parameters)


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Every pattern there is, NaNs that signal among them; page 0 is zero."""
    bits = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    bits[0] = 0
    return bits.view(dtype).reshape(shape)


def bits_of(array: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8).reshape(len(array), -1)


def assert_same_bits(actual: list[Any], expected: list[Any]) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(bits_of(one), bits_of(other))


def pool(rng: np.random.Generator, dtype: DType) -> list[KVLayer]:
    """Two layers of odd sizes."""
    shape = (NUM_PAGES, 3, 5)
    arrays = [random_bits(rng, shape, jnp.dtype(dtype)) for _ in range(4)]
    k0, v0, k1, v1 = (jax.device_put(array, EVERYWHERE) for array in arrays)
    return [ReferencePages(k0, v0), ReferencePages(k1, v1)]


def transfers_of(decoder: Decoder, kv: list[KVLayer]) -> DeviceExecutor:
    """An executor of two executables, over pages that no step touches."""
    slots = jax.device_put(empty_slots(2, 3, 1), EVERYWHERE)
    tables = jax.device_put(empty_tables(2, 40, 1), EVERYWHERE)
    state = DeviceState(kv, slots, tables)

    def ignore(done: int, total: int) -> None:
        assert total == len(TransferKey)

    table = compile_table(
        [], ReferenceBackend(), decoder, state, EVERYWHERE, ignore, with_transfers=True
    )
    return DeviceExecutor(table, decoder, state, EVERYWHERE, [])


def pages_of(executor: DeviceExecutor) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in executor._state[: executor._num_kv_leaves]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [0, 1, PAGES_PER_TRANSFER, 11, 19])
def test_pages_come_back_bit_for_bit_and_no_other_changes(
    decoder: Decoder, dtype: DType, count: int
):
    rng = np.random.default_rng(count)
    executor = transfers_of(decoder, pool(rng, dtype))
    before = pages_of(executor)
    sources = rng.permutation(np.arange(1, NUM_PAGES))[:count].tolist()
    targets = rng.permutation(np.arange(1, NUM_PAGES))[:count].tolist()
    executor.export_pages([(page, 100 + i) for i, page in enumerate(sources)])
    assert_same_bits(pages_of(executor), before)

    overwritten = jax.tree.leaves(pool(rng, dtype))
    expected = [np.array(leaf) for leaf in overwritten]
    executor._state[: len(overwritten)] = overwritten
    # In another order than they left in, so that calls mix pages of different exports.
    order = rng.permutation(count).tolist()
    executor.import_pages([(100 + i, targets[i]) for i in order])
    for leaf, old in zip(expected, before, strict=True):
        leaf[targets] = old[sources]
        assert not bits_of(leaf)[0].any()
    assert_same_bits(pages_of(executor), expected)
    assert not executor._on_host


def test_a_page_on_the_host_is_one_array_in_memory_that_the_device_reads(decoder: Decoder):
    kv = pool(np.random.default_rng(0), "bfloat16")
    executor = transfers_of(decoder, kv)
    executor.export_pages([(7, 1)])
    (content,) = executor._on_host.values()
    assert content.sharding.memory_kind == "pinned_host"
    assert content.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(kv)) // NUM_PAGES


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_where_memories_differ_content_lands_in_host_and_device_memory(platform: str):
    """Lowered for a device that is not here: on the CPU both memories are the same."""
    kv = pool(np.random.default_rng(0), "bfloat16")

    def placements(traced: jax.stages.Traced, kind: str) -> int:
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return text.count(f'_xla_buffer_placement = "{kind}"')

    assert placements(trace_export(kv, EVERYWHERE), "pinned_host") == PAGES_PER_TRANSFER
    assert placements(trace_import(kv, EVERYWHERE), "device") >= PAGES_PER_TRANSFER
    text = trace_import(kv, EVERYWHERE).lower(lowering_platforms=(platform,)).as_text()
    arguments = text[: text.index("->")]
    assert arguments.count('mhlo.memory_kind = "pinned_host"') == PAGES_PER_TRANSFER


def test_whatever_an_entry_of_the_kv_holds_moves_with_its_page():
    """Quantised keys with a scale each, and values of another width: bytes are the common word."""
    rng = np.random.default_rng(0)

    def entry() -> dict[str, Any]:
        return {
            "k": jnp.asarray(random_bits(rng, (6, 3, 2), np.int8)),
            "scale": jnp.asarray(random_bits(rng, (6, 3), np.float32)),
            "v": jnp.asarray(random_bits(rng, (6, 2, 2, 2), ml_dtypes.bfloat16)),
        }

    kv, other = [entry(), entry()], [entry(), entry()]
    assert page_spec(kv) == jax.ShapeDtypeStruct((2 * (6 + 12 + 16),), np.uint8)
    contents = export_pages(kv, jnp.array([4, 2, 0]))
    padded = [contents[0], contents[1], contents[0]]
    written = import_pages(other, jnp.array([1, 5, 1]), padded)
    expected = [np.array(leaf) for leaf in jax.tree.leaves(other)]
    for leaf, old in zip(expected, jax.tree.leaves(kv), strict=True):
        leaf[[1, 5]] = old[np.array([4, 2])]
    assert jax.tree.structure(written) == jax.tree.structure(kv)
    assert_same_bits(jax.tree.leaves(written), expected)


def test_a_reader_leaves_the_pool_and_a_writer_takes_it(decoder: Decoder):
    """Neither copies it."""
    executor = transfers_of(decoder, pool(np.random.default_rng(0), "float32"))
    before = executor._state[: executor._num_kv_leaves]
    executor.export_pages([(1, 1), (2, 2)])
    assert all(a is b for a, b in zip(before, executor._state, strict=False))
    executor.import_pages([(2, 3)])
    assert all(leaf.is_deleted() for leaf in before)
    compiled: Any = executor._table[TransferKey.IMPORT]
    kv_bytes = sum(leaf.nbytes for leaf in before)
    assert compiled.memory_analysis().alias_size_in_bytes == kv_bytes
    for key in TransferKey:
        compiled = executor._table[key]
        assert compiled.memory_analysis().temp_size_in_bytes < kv_bytes


def test_a_page_that_is_read_twice_comes_back_for_each(decoder: Decoder):
    """Two preempted requests that shared it have a copy each."""
    executor = transfers_of(decoder, pool(np.random.default_rng(2), "float32"))
    before = pages_of(executor)
    executor.export_pages([(5, 1), (6, 2), (5, 3)])
    executor.import_pages([(1, 7), (3, 8)])
    for leaf, old in zip(pages_of(executor), before, strict=True):
        assert_same_bits([leaf[[7, 8]]], [old[[5, 5]]])


def test_pages_are_dropped_one_by_one(decoder: Decoder):
    executor = transfers_of(decoder, pool(np.random.default_rng(0), "float32"))
    executor.export_pages([(page, page) for page in range(1, 5)])
    held = {handle: weakref.ref(content) for handle, content in executor._on_host.items()}
    executor.drop_pages([2, 3])
    assert [held[handle]() is None for handle in (1, 2, 3, 4)] == [False, True, True, False]
    executor.import_pages([(4, 40)])
    executor.wait()
    assert held[4]() is None
    assert [*executor._on_host] == [1]


def test_what_cannot_be_is_an_error_before_anything_is_written(decoder: Decoder):
    executor = transfers_of(decoder, pool(np.random.default_rng(0), "float32"))
    before = pages_of(executor)
    executor.export_pages([(1, 1), (2, 2)])
    executor.drop_pages([1])
    for handle in (1, 3):  # dropped, and never there
        with pytest.raises(KeyError, match=str(handle)):
            executor.import_pages([(handle, 5)])
        with pytest.raises(KeyError, match=str(handle)):
            executor.drop_pages([handle])
    with pytest.raises(ValueError, match="handle 2 already names a page"):
        executor.export_pages([(5, 2)])
    for page in (0, -1, NUM_PAGES):  # zero for good; wraps; another stands in for it
        with pytest.raises(ValueError, match=rf"page is {page}; it must be in \[1, 41\)"):
            executor.import_pages([(2, page)])
        with pytest.raises(ValueError, match=rf"page is {page}; it must be in \[1, 41\)"):
            executor.export_pages([(page, 9)])
    with pytest.raises(ValueError, match="pages differ"):
        executor.import_pages([(2, 5), (2, 5)])
    assert_same_bits(pages_of(executor), before)
    assert [*executor._on_host] == [2]


def test_without_host_memory_there_are_no_transfers(tiny_engine: Engine):
    executor: Any = tiny_engine._executor
    assert not executor.can_keep_pages
    with pytest.raises(RuntimeError, match="host_kv_bytes is 0"):
        executor.export_pages([(1, 1)])
    with pytest.raises(RuntimeError, match="host_kv_bytes is 0"):
        executor.import_pages([(1, 1)])


@pytest.fixture(scope="module")
def host_tier(tiny_model: Model) -> DeviceExecutor:
    """That of a real engine, warmed up."""
    executor = tiny_model.build(replace(TINY_ENGINE, host_kv_bytes=1_000_000))._executor
    assert isinstance(executor, DeviceExecutor)
    return executor


def test_nothing_compiles_once_the_engine_is_built(host_tier: DeviceExecutor):
    num_compiled = compile_events()
    with jax.transfer_guard_host_to_device("disallow"):
        for count in (1, 7, 8, 9, 40):
            host_tier.export_pages([(1 + page, page) for page in range(count)])
            host_tier.import_pages([(handle, 60 - handle) for handle in range(count // 2)])
            host_tier.drop_pages(range(count // 2, count))
        host_tier.wait()
    assert compile_events() == num_compiled


LAYOUT = UploadLayout(
    StepKey(rows=2, chunk=16),
    TINY_ENGINE.max_num_seqs,
    TINY_ENGINE.page_size,
    TINY_ENGINE.max_stop_ids,
    num_words(VOCAB_SIZE),
)


def prefill(
    executor: DeviceExecutor, *, pages: list[int], start: int, tokens: list[int], is_last: bool
) -> jax.Array:
    """Starts one chunk of a prompt in slot 3; the last one samples, with its log-probability."""
    packed = packing.pack(NOTHING, LAYOUT)
    parts = LAYOUT.split(packed)
    row = parts["slot_rows"][0]
    row[:] = 0
    row[packing.SLOT], row[packing.REMAINING], row[packing.LOGPROBS] = 3, 1, 1
    row[packing.STOP_IDS :] = packing.NO_TOKEN
    for column, page in enumerate(pages):
        parts["page_entries"][column] = 3, column, page
    parts["segments"][0] = 3, start, len(tokens), is_last
    parts["chunk_tokens"][: len(tokens)] = tokens
    return executor.dispatch(LAYOUT.key, packed)


def test_transfers_and_steps_run_in_the_order_of_the_calls(host_tier: DeviceExecutor):
    """One page of context, moved while it is overwritten; nothing is waited for until the end."""
    context, other, tail = [1, 2, 3, 4, 5], [9, 8, 7, 6, 5], [11, 12, 13]

    def begin(page: int, tokens: list[int]) -> None:
        prefill(host_tier, pages=[page], start=0, tokens=tokens, is_last=False)

    def end(page: int) -> jax.Array:
        return prefill(host_tier, pages=[page, 30], start=5, tokens=tail, is_last=True)

    begin(20, context)
    expected = end(20)
    host_tier.export_pages([(20, 1000)])  # after the step that wrote it, before the next
    begin(20, other)
    host_tier.export_pages([(20, 1001)])
    of_other = end(20)
    begin(21, other)
    host_tier.import_pages([(1000, 21)])  # after the step that wrote it, before the next
    moved = end(21)
    host_tier.import_pages([(1001, 21)])
    moved_other = end(21)
    begin(21, context)
    again = end(21)

    results = [host_tier.fetch(r) for r in (expected, moved, again, of_other, moved_other)]
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])
    np.testing.assert_array_equal(results[4], results[3])
    assert (results[0] != results[3]).any(), "the context makes no difference: nothing was shown"
    for leaf in pages_of(host_tier):
        assert not leaf[0].any()

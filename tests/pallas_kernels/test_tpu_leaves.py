"""The word forms of loads and stores, which the interpreter cannot run, against their twins.

Here they run on buffers that have what a ref has on a TPU: views as 32-bit words, reshaped, loaded
with a stride. What a chip makes of the same program is not shown. What would break these: an index
of a word or a stride that is off, halves that are swapped, rows in another order than masks and
sinks take them for.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from octavo.pallas_kernels.tpu_budget import buffer_words
from octavo.pallas_kernels.tpu_leaves import load_halves, load_queries, store_outputs


class WordRef:
    """Memory of 32-bit words under a shape, or of their halves along the axis before the last."""

    def __init__(self, words: np.ndarray, is_halves: bool) -> None:
        self.words, self.is_halves = words, is_halves

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, last, lanes = self.words.shape
        return (*leading, 2 * last if self.is_halves else last, lanes)

    @property
    def at(self) -> "WordRef":
        return self

    def bitcast(self, dtype: Any) -> "WordRef":
        assert self.is_halves
        assert dtype == jnp.uint32
        return WordRef(self.words, is_halves=False)

    def reshape(self, *shape: int) -> "WordRef":
        assert not self.is_halves
        words = self.words.reshape(shape)
        assert np.shares_memory(words, self.words)
        return WordRef(words, is_halves=False)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, tuple):
            return WordRef(self.words[int(index)], self.is_halves)
        return jnp.asarray(self.words[self._rows(index)])

    def __setitem__(self, index: Any, value: jax.Array) -> None:
        rows = self.words[self._rows(index)]
        assert rows.shape == value.shape
        self.words[self._rows(index)] = value

    def _rows(self, index: Any) -> slice:
        rows, lanes = index
        assert not self.is_halves
        assert self.words.ndim == 2
        assert lanes == slice(None)
        assert rows.start + (rows.size - 1) * rows.stride < self.words.shape[0]
        return slice(rows.start, rows.start + (rows.size - 1) * rows.stride + 1, rows.stride)


class PlainRef:
    """The same memory as the interpreter has it."""

    def __init__(self, halves: np.ndarray) -> None:
        self.halves = halves
        self.shape = halves.shape
        self.dtype = halves.dtype

    def __getitem__(self, index: Any) -> jax.Array:
        return jnp.asarray(self.halves[self._numbers(index)])

    def __setitem__(self, index: Any, value: jax.Array) -> None:
        self.halves[self._numbers(index)] = value

    def _numbers(self, index: Any) -> Any:
        return tuple(part if isinstance(part, slice) else int(part) for part in index)


def _both(shape: tuple[int, ...]) -> tuple[WordRef, PlainRef]:
    """Random memory of the shape [..., 2, lanes], of its own for each."""
    halves = np.random.default_rng(0).normal(size=shape).astype(jnp.bfloat16)
    bits = halves.view(np.uint16).astype(np.uint32)
    words = bits[..., :1, :] | bits[..., 1:, :] << 16  # as pltpu.bitcast documents it
    return WordRef(words.copy(), is_halves=True), PlainRef(halves.copy())


@pytest.fixture(autouse=True)
def _compiled_bitcast(monkeypatch: pytest.MonkeyPatch) -> None:
    # Outside of a kernel JAX runs it in compiled programs only.
    monkeypatch.setattr(pltpu, "bitcast", jax.jit(pltpu.bitcast, static_argnums=1))


@pytest.mark.parametrize("lanes", [128, 256])
@pytest.mark.parametrize("words", [1, 2, 3, 8])
def test_halves_of_words(words: int, lanes: int):
    refs = _both((3, 64, buffer_words(words), 2, lanes))
    is_alive = jnp.arange(64)[:, None] < jnp.full(lanes, 37)
    for word in range(words):
        for mask in (None, is_alive):
            by_word, plain = (
                load_halves(ref, jnp.int32(1), word, mask, interpret=interpret)
                for ref, interpret in zip(refs, (False, True), strict=True)
            )
            for found, expected in zip(by_word, plain, strict=True):
                assert found.shape == (64, lanes)
                np.testing.assert_array_equal(found, expected)


_tiles = pytest.mark.parametrize(
    ("tile", "heads", "pairs", "lanes"),
    [
        (1, 1, 1, 128),
        (1, 8, 2, 128),
        (1, 2, 8, 256),
        (2, 3, 1, 128),
        (16, 8, 2, 128),
        (8, 2, 4, 256),
    ],
)


@_tiles
def test_queries_of_a_tile(tile: int, heads: int, pairs: int, lanes: int):
    refs = _both((2, tile, heads, pairs, 2, lanes))
    for head in range(heads):
        by_word, plain = (
            load_queries(ref, jnp.int32(1), head, interpret=interpret)
            for ref, interpret in zip(refs, (False, True), strict=True)
        )
        assert by_word.shape == (2 * tile * pairs, lanes)
        np.testing.assert_array_equal(by_word, plain)


@_tiles
def test_outputs_of_a_tile(tile: int, heads: int, pairs: int, lanes: int):
    refs = by_word, plain = _both((2, tile, heads, pairs, 2, lanes))
    values = np.random.default_rng(1).normal(size=(heads, 2 * tile * pairs, lanes))
    for head, of_head in enumerate(jnp.asarray(values, jnp.bfloat16)):
        for ref, interpret in zip(refs, (False, True), strict=True):
            store_outputs(ref, jnp.int32(1), head, of_head, interpret=interpret)
    bits = plain.halves.view(np.uint16).astype(np.uint32)
    np.testing.assert_array_equal(by_word.words, bits[..., :1, :] | bits[..., 1:, :] << 16)

"""One step's attention as NumPy data, and what it must give: an oracle that knows no pages.

A `Shape` is what is compiled; a `Case` is data for it: lengths of the decode rows, and the segments
of the chunk. Every backend is held to the same cases.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from octavo.pallas_kernels import paged_attention
from octavo.pallas_kernels.paged_attention import KVLayer, Segments

NUM_SEGMENTS = 8


@dataclass(frozen=True)
class Shape:
    """What one executable is compiled for; `max_len` is how much a page table can hold."""

    rows: int
    chunk: int
    page_size: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: str = "float32"
    max_len: int = 520

    @property
    def columns(self) -> int:
        return -(-self.max_len // self.page_size)

    @property
    def num_pages(self) -> int:
        """For every row and segment at its longest, page 0, and some that stay free."""
        return (self.rows + (NUM_SEGMENTS if self.chunk else 0)) * self.columns + 4

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def __str__(self) -> str:
        return (
            f"rows{self.rows}-chunk{self.chunk}-page{self.page_size}-kv{self.kv_heads}"
            f"-group{self.group}-dim{self.head_dim}-{self.dtype}"
        )


@dataclass(frozen=True)
class Case:
    """Data of one step.

    Attributes:
      q, k, v: Of the step's tokens: rows, then the chunk.
      k_pages, v_pages: Before the step.
      page_table, kv_lens: Of the rows.
      segment_page_table, segment_kv_lens, segment_q_lens: Of the segments.
      places: For each token (page, offset) where its KV belongs, or None for padding.
      expected: float64; zeros for padding.
    """

    shape: Shape
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    kv_lens: np.ndarray
    segment_page_table: np.ndarray
    segment_kv_lens: np.ndarray
    segment_q_lens: np.ndarray
    places: list[tuple[int, int] | None]
    expected: np.ndarray

    def with_free_places(self, value: float) -> "Case":
        """The same with another value wherever NaN is: in places never written, and in padding."""

        def refill(array: np.ndarray) -> np.ndarray:
            return np.where(np.isnan(array), np.asarray(value, array.dtype), array)

        return replace(
            self,
            q=refill(self.q),
            k=refill(self.k),
            v=refill(self.v),
            k_pages=refill(self.k_pages),
            v_pages=refill(self.v_pages),
        )


def make_case(
    shape: Shape,
    row_lens: Sequence[int],
    segments: Sequence[tuple[int, int]] = (),
    seed: int = 0,
) -> Case:
    """A step of random keys and values. Places that nobody wrote and padded tokens hold NaN.

    Args:
      shape: What it is for.
      row_lens: Tokens that each row sees, its own included; 0: padding. The rest is padding too.
      segments: (tokens before the chunk, tokens in the chunk) of each segment.
      seed: A request's data depends on this and on its place in its list alone, so that the same
        row of two cases differs only where the cases say so.
    """
    tokens, kv_heads = shape.rows + shape.chunk, shape.kv_heads
    dtype = jax.numpy.dtype(shape.dtype)
    rng = np.random.default_rng(seed)
    page_shape = (shape.num_pages, shape.page_size, kv_heads, shape.head_dim)
    k_pages, v_pages = (np.full(page_shape, np.nan, dtype) for _ in range(2))
    k_pages[0] = v_pages[0] = 0
    q = np.full((tokens, kv_heads * shape.group, shape.head_dim), np.nan, np.float32)
    k, v = (np.full((tokens, kv_heads, shape.head_dim), np.nan, np.float32) for _ in range(2))
    places: list[tuple[int, int] | None] = [None] * tokens
    expected = np.zeros(q.shape)
    # Any order of pages, with free ones in between; unused entries hold what others use.
    free = rng.permutation(np.arange(1, shape.num_pages)).tolist()
    row_tables = rng.choice(free, (shape.rows, shape.columns)).astype(np.int32)
    segment_tables = rng.choice(free, (NUM_SEGMENTS, shape.columns)).astype(np.int32)
    kv_lens = np.zeros(shape.rows, np.int32)
    kv_lens[: len(row_lens)] = row_lens
    segment_kv_lens, segment_q_lens = (np.zeros(NUM_SEGMENTS, np.int32) for _ in range(2))

    def place(table: np.ndarray, kv_len: int, first: int, count: int, identity: int) -> None:
        """Gives tokens [first, first + count) of the step their history of kv_len tokens."""
        own = np.random.default_rng([seed, identity])
        q[first : first + count] = own.normal(size=q[first : first + count].shape)
        history = own.normal(size=(2, kv_len, kv_heads, shape.head_dim)).astype(np.float32)
        history = history.astype(dtype)
        pages = [free.pop() for _ in range(-(-kv_len // shape.page_size))]
        table[: len(pages)] = pages
        for position in range(kv_len):
            at = pages[position // shape.page_size], position % shape.page_size
            fresh = position - (kv_len - count)
            if fresh < 0:
                k_pages[at], v_pages[at] = history[:, position]
            else:
                k[first + fresh], v[first + fresh] = history[:, position].astype(np.float32)
                places[first + fresh] = at
        own_k, own_v = history.astype(np.float64)
        expected[first : first + count] = _attend(
            q[first : first + count], own_k, own_v, shape.scale
        )

    for row, kv_len in enumerate(row_lens):
        if kv_len:
            place(row_tables[row], kv_len, row, 1, row)
    first = shape.rows
    for index, (before, count) in enumerate(segments):
        segment_kv_lens[index], segment_q_lens[index] = before + count, count
        place(segment_tables[index], before + count, first, count, 1000 + index)
        first += count
    return Case(
        shape=shape,
        q=q,
        k=k,
        v=v,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=row_tables,
        kv_lens=kv_lens,
        segment_page_table=segment_tables,
        segment_kv_lens=segment_kv_lens,
        segment_q_lens=segment_q_lens,
        places=places,
        expected=expected,
    )


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Softmax attention of the last len(q) of len(k) tokens, one token and head at a time."""
    count, q_heads, _ = q.shape
    group = q_heads // k.shape[1]
    mixed = np.zeros(q.shape)
    for i in range(count):
        seen = len(k) - count + i + 1
        for head in range(q_heads):
            scores = k[:seen, head // group] @ q[i, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            mixed[i, head] = weights @ v[:seen, head // group] / weights.sum()
    return mixed


def compiled_step(shape: Shape) -> Callable[..., Any]:
    """Work lists and attention of one layer, jitted for a shape."""

    @jax.jit
    def step(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_layer: KVLayer,
        page_table: jax.Array,
        kv_lens: jax.Array,
        segments: Segments | None,
    ) -> tuple[jax.Array, KVLayer]:
        batch = paged_attention.paged_batch(
            page_table,
            kv_lens,
            segments,
            chunk=shape.chunk,
            page_size=shape.page_size,
            num_pages=shape.num_pages,
        )
        return paged_attention.attend(q, k, v, kv_layer, batch, scale=shape.scale)

    return step


def run(step: Callable[..., Any], case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention, key pages and value pages after the step."""
    shape = case.shape
    width = shape.kv_heads * shape.head_dim

    def layer(pages: np.ndarray) -> jax.Array:
        return jax.numpy.asarray(pages.reshape(shape.num_pages, shape.page_size, width))

    segments = Segments(
        jax.numpy.asarray(case.segment_page_table),
        jax.numpy.asarray(case.segment_kv_lens),
        jax.numpy.asarray(case.segment_q_lens),
    )
    attended, kv_layer = step(
        case.q,
        case.k,
        case.v,
        KVLayer(layer(case.k_pages), layer(case.v_pages)),
        case.page_table,
        case.kv_lens,
        segments if shape.chunk else None,
    )
    k_pages, v_pages = (
        np.asarray(pages).reshape(case.k_pages.shape) for pages in (kv_layer.k, kv_layer.v)
    )
    return np.asarray(attended), k_pages, v_pages


def pages_after(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Key and value pages with the step's tokens stored and nothing else touched."""
    k_pages, v_pages = case.k_pages.copy(), case.v_pages.copy()
    for token, at in enumerate(case.places):
        if at is not None:
            k_pages[at], v_pages[at] = case.k[token], case.v[token]
    return k_pages, v_pages


def bits(array: np.ndarray) -> np.ndarray:
    """For comparisons in which NaN equals NaN and 0 does not equal -0."""
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])

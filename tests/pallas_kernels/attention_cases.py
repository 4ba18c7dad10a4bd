"""One step's attention as NumPy data, and what it must give: an oracle that knows no pages.

A `Shape` is what is compiled; a `Case` is data for it: lengths of the decode rows, and the segments
of the chunk. Every backend is held to the same cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from octavo.pallas_kernels.backend import AttentionShape, KVShape, Scoring

NUM_SEGMENTS = 8
GARBAGE = 2**30  # in page-table entries past a request's pages: no page at all


@dataclass(frozen=True)
class Options:
    """What changes scores and values: see paged_attention.attend. Scales are powers of two."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    k_scale: float | None = None
    v_scale: float | None = None

    def __str__(self) -> str:
        named = [f"{name}{value}" for name, value in vars(self).items() if value]
        return "-".join(named) or "plain"


PLAIN = Options()
EVERYTHING = Options(window=45, softcap=2.0, sinks=True, k_scale=0.25, v_scale=2.0)


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
    options: Options = PLAIN

    @property
    def columns(self) -> int:
        return -(-self.max_len // self.page_size)

    @property
    def num_pages(self) -> int:
        """For every row and segment at its longest, page 0, and some that stay free."""
        return (self.rows + (NUM_SEGMENTS if self.chunk else 0)) * self.columns + 4

    @property
    def scoring(self) -> Scoring:
        options = self.options
        return Scoring(scale=self.head_dim**-0.5, window=options.window, softcap=options.softcap)

    def attention_shape(self, num_devices: int = 1) -> AttentionShape:
        """What each of the devices that share the kv heads is asked for."""
        assert self.kv_heads % num_devices == 0
        kv_heads = self.kv_heads // num_devices
        return AttentionShape(
            kv=KVShape(
                kv_heads=kv_heads,
                head_dim=self.head_dim,
                page_size=self.page_size,
                dtype=self.dtype,
            ),
            q_heads=kv_heads * self.group,
            rows=self.rows,
            chunk=self.chunk,
            segments=NUM_SEGMENTS,
            pages_per_seq=self.columns,
        )

    def __str__(self) -> str:
        return (
            f"rows{self.rows}-chunk{self.chunk}-page{self.page_size}-kv{self.kv_heads}"
            f"-group{self.group}-dim{self.head_dim}-{self.dtype}-{self.options}"
        )


@dataclass(frozen=True)
class Case:
    """Data of one step.

    Attributes:
      q, k, v: Of the step's tokens: rows, then the chunk.
      sinks: A score per head, used where the shape's options say so.
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
    sinks: np.ndarray
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
    # Any order of pages, with free ones in between; unused entries are stale, or garbage.
    free = rng.permutation(np.arange(1, shape.num_pages)).tolist()
    stale = [*free, *[GARBAGE] * len(free)]
    row_tables = rng.choice(stale, (shape.rows, shape.columns)).astype(np.int32)
    segment_tables = rng.choice(stale, (NUM_SEGMENTS, shape.columns)).astype(np.int32)
    sinks = rng.normal(size=kv_heads * shape.group).astype(np.float32)
    k_scale, v_scale = shape.options.k_scale or 1.0, shape.options.v_scale or 1.0
    kv_lens = np.zeros(shape.rows, np.int32)
    kv_lens[: len(row_lens)] = row_lens
    segment_kv_lens, segment_q_lens = (np.zeros(NUM_SEGMENTS, np.int32) for _ in range(2))

    def place(table: np.ndarray, kv_len: int, first: int, count: int, identity: int) -> None:
        """Gives tokens [first, first + count) of the step their history of kv_len tokens."""
        own = np.random.default_rng([seed, identity])
        q[first : first + count] = own.normal(size=q[first : first + count].shape)
        history = own.normal(size=(2, kv_len, kv_heads, shape.head_dim)).astype(np.float32)
        history[1] *= loudness(shape, kv_len, count)[:, None, None]
        history = history.astype(dtype)
        pages = [free.pop() for _ in range(-(-kv_len // shape.page_size))]
        table[: len(pages)] = pages
        for position in range(kv_len):
            at = pages[position // shape.page_size], position % shape.page_size
            fresh = position - (kv_len - count)
            if fresh < 0:
                k_pages[at], v_pages[at] = history[:, position]
            else:
                new_k, new_v = history[:, position].astype(np.float32)
                k[first + fresh], v[first + fresh] = new_k * k_scale, new_v * v_scale
                places[first + fresh] = at
        own_k, own_v = history.astype(np.float64)
        expected[first : first + count] = attention(
            q[first : first + count], own_k * k_scale, own_v * v_scale, sinks, shape
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
        sinks=sinks,
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


def loudness(shape: Shape, kv_len: int, count: int) -> np.ndarray:
    """What the values of a request's tokens are multiplied with; the last `count` are the step's.

    Beside hundreds of others a token is lost within the tolerance. So those are loud at which
    faults begin: on both sides of every border of pages and blocks, the first and the last token,
    and those where the last one's window begins. As loud as the first of the step's tokens that
    sees them can bear: beside few others they would drown it.
    """
    window = shape.options.window
    pages = -(-16 // shape.page_size) * shape.page_size  # were all tokens loud, none would be
    borders = {*range(0, kv_len + 1, pages), *range(0, kv_len + 1, 32), kv_len}
    borders |= set() if window is None else {max(0, kv_len - window)}
    loud = [at for border in borders for at in (border - 1, border) if 0 <= at < kv_len]
    num_seen = np.maximum(np.arange(kv_len), kv_len - count) + 1  # by the first that sees each
    factors = np.ones(kv_len, np.float32)
    factors[loud] = np.maximum(1, np.minimum(num_seen[loud], window or kv_len) / 10)
    return factors


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray, shape: Shape
) -> np.ndarray:
    """Softmax attention of the last len(q) of len(k) tokens, one token and head at a time."""
    options = shape.options
    count, q_heads, _ = q.shape
    group = q_heads // k.shape[1]
    mixed = np.zeros(q.shape)
    for i in range(count):
        stop = len(k) - count + i + 1
        seen = slice(0 if options.window is None else max(0, stop - options.window), stop)
        for head in range(q_heads):
            scores = k[seen, head // group] @ q[i, head].astype(np.float64) * shape.scoring.scale
            if options.softcap is not None:
                scores = options.softcap * np.tanh(scores / options.softcap)
            highest = max(scores.max(), sinks[head]) if options.sinks else scores.max()
            weights = np.exp(scores - highest)
            total = weights.sum() + (np.exp(sinks[head] - highest) if options.sinks else 0)
            mixed[i, head] = weights @ v[seen, head // group] / total
    return mixed


def pages_after(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Key and value pages with the step's tokens stored and nothing else touched."""
    k_pages, v_pages = case.k_pages.copy(), case.v_pages.copy()
    for token, at in enumerate(case.places):
        if at is not None:
            options = case.shape.options
            k_pages[at] = case.k[token] / (options.k_scale or 1.0)
            v_pages[at] = case.v[token] / (options.v_scale or 1.0)
    return k_pages, v_pages


def bits(array: np.ndarray) -> np.ndarray:
    """For comparisons in which NaN equals NaN and 0 does not equal -0."""
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])

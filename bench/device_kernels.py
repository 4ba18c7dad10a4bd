"""Times of the platform's attention and KV writes, alone. Part "kernels" of device_check.

Each call reads other pages than the last, out of a pool that no cache holds, as the layers of a
model do; its queries are what the last one gave. Work lists are built with each call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..pallas_kernels.backend import AttentionBackend, AttentionShape, KVLayer, KVShape, Scoring
from ..pallas_kernels.choice import choose
from ..pallas_kernels.chunk_tokens import Segments, chunk_tokens
from ..pallas_kernels.reference_backend import ReferenceBackend
from .device_parts import Findings, Tasks
from .device_timing import per_call


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is timed.

    Attributes:
      rows, kv_lens: Of decode calls, each with each.
      chunk: Tokens of a prefill call and of the larger write.
      prefixes: Tokens before the chunk.
      kv: The pages.
      q_heads: Query heads.
      cold_bytes: Least size of the pool.
      moved_bytes: What all calls of a loop move together, roughly.
      compared_rows: The rows at which the reference is timed too.
    """

    rows: tuple[int, ...]
    kv_lens: tuple[int, ...]
    chunk: int
    prefixes: tuple[int, ...]
    kv: KVShape
    q_heads: int
    cold_bytes: int
    moved_bytes: int
    compared_rows: int

    @property
    def token_bytes(self) -> int:
        """Key and value of one token."""
        return 4 * self.kv.kv_heads * self.kv.head_dim

    def calls(self, call_bytes: int) -> int:
        """How many calls of so many bytes make a loop."""
        return min(max(self.moved_bytes // call_bytes, 20), 400)

    def attention_shape(self) -> AttentionShape:
        """The largest of all calls."""
        longest = max(*self.kv_lens, *(prefix + self.chunk for prefix in self.prefixes))
        return AttentionShape(
            kv=self.kv,
            q_heads=self.q_heads,
            rows=max(self.rows),
            chunk=self.chunk,
            segments=1,
            pages_per_seq=-(-longest // self.kv.page_size),
        )


FULL = Sizes(
    rows=(1, 16, 64, 256),
    kv_lens=(1024, 4096),
    chunk=512,
    prefixes=(0, 4096),
    kv=KVShape(kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16"),
    q_heads=32,
    cold_bytes=2**29,
    moved_bytes=20 * 10**9,
    compared_rows=64,
)
SMALL = Sizes(
    rows=(2,),
    kv_lens=(32,),
    chunk=16,
    prefixes=(16,),
    kv=KVShape(kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16"),
    q_heads=4,
    cold_bytes=2**18,
    moved_bytes=2**18,
    compared_rows=2,
)


def tasks(is_dry_run: bool) -> Tasks:
    """Decode, prefill and writes with the platform's backend; some with the reference beside it."""
    sizes = SMALL if is_dry_run else FULL
    choice = choose("auto", jax.devices()[0], sizes.attention_shape())
    backend, name = choice.backend, choice.backend.name
    found: dict[str, Callable[[], Findings]] = {
        f"{name} decode {rows} x {kv_len}": partial(decode, backend, sizes, rows, kv_len)
        for rows in sizes.rows
        for kv_len in sizes.kv_lens
    }
    for prefix in sizes.prefixes:
        found[f"{name} prefill after {prefix}"] = partial(prefill, backend, sizes, prefix)
    for tokens in (max(sizes.rows), sizes.chunk):
        found[f"{name} write {tokens}"] = partial(write, backend, sizes, tokens)
    reference = ReferenceBackend()
    for kv_len in sizes.kv_lens:
        found[f"beside it: decode {sizes.compared_rows} x {kv_len}"] = partial(
            decode, reference, sizes, sizes.compared_rows, kv_len
        )
    found[f"beside it: prefill after {sizes.prefixes[-1]}"] = partial(
        prefill, reference, sizes, sizes.prefixes[-1]
    )
    if choice.reason:
        found["choice"] = lambda: {"failures": [f"the kernels do not run: {choice.reason}"]}
    return found


def decode(backend: AttentionBackend, sizes: Sizes, rows: int, kv_len: int) -> Findings:
    """One decode call: so many rows that each see so many tokens."""
    kv_layer, tables = _pool(backend, sizes, rows, kv_len)
    kv_lens = jnp.full(rows, kv_len, jnp.int32)

    def call(q: jax.Array, table: jax.Array, kv_layer: KVLayer) -> jax.Array:
        work = backend.decode_work(table, kv_lens, page_size=sizes.kv.page_size)
        return backend.decode_attention(q, kv_layer, work, _scoring(sizes), None)

    num_bytes = rows * kv_len * sizes.token_bytes
    return {
        "attention": backend.name,
        "bytes": num_bytes,
        **_attend(call, sizes, rows, kv_layer, tables, num_bytes),
    }


def prefill(backend: AttentionBackend, sizes: Sizes, prefix: int) -> Findings:
    """One prefill call: a chunk of one prompt, after so many tokens of it."""
    chunk, kv_len = sizes.chunk, prefix + sizes.chunk
    kv_layer, tables = _pool(backend, sizes, 1, kv_len)

    def call(q: jax.Array, table: jax.Array, kv_layer: KVLayer) -> jax.Array:
        lens = jnp.array([[kv_len], [chunk]], jnp.int32)
        segments = Segments(table, kv_lens=lens[0], q_lens=lens[1])
        tokens = chunk_tokens(segments, chunk)
        work = backend.prefill_work(segments, tokens, page_size=sizes.kv.page_size)
        return backend.prefill_attention(q, kv_layer, work, _scoring(sizes), None)

    # Token i of the chunk sees prefix + i + 1; each costs a product with its key and its value.
    seen = chunk * prefix + chunk * (chunk + 1) // 2
    return {
        "attention": backend.name,
        "flops": 4 * sizes.q_heads * sizes.kv.head_dim * seen,
        **_attend(call, sizes, chunk, kv_layer, tables, kv_len * sizes.token_bytes),
    }


def write(backend: AttentionBackend, sizes: Sizes, tokens: int) -> Findings:
    """One write of so many tokens, each to a page of its own as far as there are pages."""
    kv_layer, _ = _pool(backend, sizes, 1, tokens * sizes.kv.page_size)
    num_pages, page_size = jax.tree.leaves(kv_layer)[0].shape[:2]
    k, v = (_random(seed, (tokens, sizes.kv.kv_heads, sizes.kv.head_dim)) for seed in (1, 2))
    num_bytes = 2 * tokens * sizes.token_bytes  # read once, written once

    def loop(count: int, kv_layer: KVLayer, k: jax.Array, v: jax.Array) -> KVLayer:
        def call(index: jax.Array, kv_layer: KVLayer) -> KVLayer:
            pages = 1 + (jnp.arange(tokens) + index * tokens) % (num_pages - 1)
            return backend.write_kv(kv_layer, k, v, pages * page_size + index % page_size)

        return lax.fori_loop(0, count, call, kv_layer)

    calls = sizes.calls(num_bytes)
    return {
        "attention": backend.name,
        "bytes": num_bytes,
        **per_call(loop, calls, kv_layer, k, v, donated=(0,)),
    }


def _attend(
    call: Callable[[jax.Array, jax.Array, KVLayer], jax.Array],
    sizes: Sizes,
    tokens: int,
    kv_layer: KVLayer,
    tables: jax.Array,
    num_bytes: int,
) -> Findings:
    """Times a call that attends; the next one's queries are what it gave."""

    def loop(count: int, q: jax.Array, kv_layer: KVLayer, tables: jax.Array) -> jax.Array:
        def body(index: jax.Array, q: jax.Array) -> jax.Array:
            return call(q, tables[index % len(tables)], kv_layer).astype(q.dtype)

        return lax.fori_loop(0, count, body, q)

    q = _random(3, (tokens, sizes.q_heads, sizes.kv.head_dim))
    return per_call(loop, sizes.calls(num_bytes), q, kv_layer, tables)


def _pool(
    backend: AttentionBackend, sizes: Sizes, rows: int, kv_len: int
) -> tuple[KVLayer, jax.Array]:
    """Random pages that no cache holds, and tables [sets, rows, columns] of pages in any order."""
    columns = -(-kv_len // sizes.kv.page_size)
    set_bytes = rows * columns * sizes.kv.page_size * sizes.token_bytes
    sets = max(1, -(-sizes.cold_bytes // set_bytes))
    num_pages = 1 + sets * rows * columns
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: backend.allocate(sizes.kv, num_pages)))
    kv_layer = jax.tree.unflatten(tree, [_random(0, leaf.shape) for leaf in leaves])
    pages = 1 + np.random.default_rng(0).permutation(num_pages - 1)
    return kv_layer, jnp.asarray(pages.reshape(sets, rows, columns), jnp.int32)


def _scoring(sizes: Sizes) -> Scoring:
    return Scoring(scale=sizes.kv.head_dim**-0.5)


@partial(jax.jit, static_argnums=(0, 1))
def _random(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

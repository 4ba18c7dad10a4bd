"""Attention over pages on TPU: one body, which is decode with tiles of one token, or prefill.

One grid step walks the work list. For each tile a running softmax goes over the blocks of keys that
it sees (FlashAttention-2, Algorithm 1, https://arxiv.org/abs/2307.08691), which a stream brings in
ahead of their use (tpu_stream.py); queries and outputs are double buffered in the same way. Blocks
begin at multiples of their size, and one that a query sees nothing of changes none of its bits: the
order of its sum depends on its own position alone. The structure (one body over a work list, two
static forms) follows JAX's ragged paged attention and RPA v3 of tpu-inference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float

from .backend import LOWEST, Scoring
from .tpu_budget import VMEM_LIMIT_BYTES, buffer_words, choose_blocking, padded_group
from .tpu_cache import LANES, NARROW, HeadLayout, TpuPages, in_place, wait_for
from .tpu_leaves import group_of_row, load_halves, load_queries, store_outputs
from .tpu_scoring import alive, bounded, unit, visible, weight
from .tpu_stream import Cursor, PageStream
from .tpu_tiles import Tile, TileWalk
from .tpu_work import TpuWork


def attend(
    q: Float[Array, "tokens q_heads head_dim"],
    kv_layer: TpuPages,
    work: TpuWork,
    scoring: Scoring,
    sinks: Float[Array, " q_heads"] | None,
    *,
    item_tokens: int,
    interpret: Any,
) -> BFloat16[Array, "tokens q_heads head_dim"]:
    """Attends every token of every item over the keys it sees; the rest are zeros.

    Args:
      q: Queries.
      kv_layer: The pages.
      work: The items; together they hold each token once.
      scoring: How queries and keys become scores.
      sinks: A score per head that has no value, or None.
      item_tokens: Most tokens of one item; 1: decode.
      interpret: As pallas_call takes it.
    """
    tokens, q_heads, head_dim = q.shape
    heads = HeadLayout(kv_layer.kv_heads, head_dim)
    group = q_heads // heads.kv_heads
    pairs = padded_group(group) // 2
    blocking = choose_blocking(heads, group, kv_layer.page_size, item_tokens)
    rows = 2 * pairs * blocking.tile

    # Two query heads share each word; an odd group gets one of zeros.
    packed = q.astype(jnp.bfloat16).reshape(tokens, heads.kv_heads, group, head_dim)
    padding = ((0, 0), (0, 0), (0, group % 2), (0, heads.lanes - head_dim))
    packed = jnp.pad(packed, padding).reshape(tokens, heads.kv_heads, pairs, 2, heads.lanes)
    has_sinks = sinks is not None
    of_sinks: list[jax.Array] = []
    if sinks is not None:
        by_group = sinks.astype(jnp.float32).reshape(heads.kv_heads, group)
        of_sinks = [jnp.pad(by_group, ((0, 0), (0, group % 2))).reshape(-1)]
    in_smem = work.page_table.ndim == 1

    hbm, smem = (pl.BlockSpec(memory_space=space) for space in (pltpu.HBM, pltpu.SMEM))
    tile_buffer = pltpu.VMEM((2, blocking.tile, *packed.shape[1:]), jnp.bfloat16)
    softmax_buffer = pltpu.VMEM((heads.kv_heads, rows, LANES), jnp.float32)
    scratch = {
        "buffers": pltpu.VMEM(
            (blocking.buffers, blocking.block, buffer_words(heads.words), 2, heads.lanes),
            jnp.bfloat16,
        ),
        "queries": tile_buffer,
        "outputs": tile_buffer,
        "high": softmax_buffer,
        "total": softmax_buffer,
        "mixed": pltpu.VMEM((heads.kv_heads, rows, heads.lanes), jnp.float32),
        "kv_arrived": pltpu.SemaphoreType.DMA((blocking.buffers,)),
        "q_arrived": pltpu.SemaphoreType.DMA((2,)),
        "o_left": pltpu.SemaphoreType.DMA((2,)),
    }
    if not in_smem:
        scratch["table_rows"] = pltpu.SMEM((2, *work.page_table.shape[1:]), jnp.int32)
        scratch["row_arrived"] = pltpu.SemaphoreType.DMA((2,))

    def body(*refs: Any) -> None:
        inputs, (output, *scratch_refs) = refs[: 8 + has_sinks], refs[8 + has_sinks :]
        row, start, q_len, kv_len, num_live, page_table, *sink_ref, queries, pages = inputs
        named = dict(zip(scratch, scratch_refs, strict=True))
        walk = TileWalk(row, start, q_len, kv_len, blocking, kv_layer.page_size, scoring.window)
        stream = PageStream(
            walk,
            num_live[0],
            page_table,
            work.columns,
            pages,
            named.pop("buffers"),
            named.pop("kv_arrived"),
            named.pop("table_rows", None),
            named.pop("row_arrived", None),
        )
        _Kernel(
            walk=walk,
            stream=stream,
            scoring=scoring,
            heads=heads,
            sinks=sink_ref[0] if has_sinks else None,
            q_hbm=queries,
            o_hbm=output,
            interpret=bool(interpret),
            **named,
        ).run()

    attended = pl.pallas_call(
        body,
        in_specs=[smem] * 5 + [smem if in_smem else hbm] + [smem] * has_sinks + [hbm] * 2,
        out_specs=hbm,
        scratch_shapes=list(scratch.values()),
        out_shape=jax.ShapeDtypeStruct(packed.shape, jnp.bfloat16),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
        ),
        interpret=interpret,
        name="decode_attention" if blocking.tile == 1 else "prefill_attention",
    )(
        work.row,
        work.start,
        work.q_len,
        work.kv_len,
        work.num_live,
        work.page_table,
        *of_sinks,
        packed,
        in_place(kv_layer.pages, interpret),
    )
    attended = attended.reshape(tokens, heads.kv_heads, 2 * pairs, heads.lanes)[:, :, :group]
    first = NARROW if heads.is_narrow else 0  # the lanes of values
    return attended[..., first : first + head_dim].reshape(tokens, q_heads, head_dim)


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """The body: static facts and the refs of one call.

    Attributes:
      walk, stream, scoring, heads: As their types say.
      sinks: [kv_heads * padded group] in scalar memory, or None.
      q_hbm, o_hbm: [tokens, kv_heads, pairs, 2, lanes].
      queries, outputs: Two tiles of each in VMEM.
      high, total, mixed: Running maximum and sum of each row, the same in all lanes, and its
        weighted values; by kv head.
      q_arrived, o_left: A semaphore for each of the two tiles.
      interpret: Run by the interpreter.
    """

    walk: TileWalk
    stream: PageStream
    scoring: Scoring
    heads: HeadLayout
    sinks: Any
    q_hbm: Any
    o_hbm: Any
    queries: Any
    outputs: Any
    high: Any
    total: Any
    mixed: Any
    q_arrived: Any
    o_left: Any
    interpret: bool

    def run(self) -> None:
        """Attends the live items, then gives zeros for the others."""
        zero = jnp.int32(0)
        num_live = self.stream.num_live

        @pl.when(num_live > 0)
        def _() -> None:
            self._q_copy(self.walk.tile(zero, zero), zero).start()

        # Carried on: the stream's cursor, the buffer in use, the slot of the tile, and how many
        # tokens of this slot's last tile and of the other's may still be on their way out.
        carry = (self.stream.begin(), zero, zero, zero, zero)

        def item(index: jax.Array, carry: Any) -> Any:
            if self.walk.blocking.tile == 1:
                return self._tile(index, zero, carry)
            return lax.fori_loop(0, self.walk.num_tiles(index), partial(self._tile, index), carry)

        _, _, slot, older, newer = lax.fori_loop(0, num_live, item, carry)
        self._wait_for_outputs(slot, older)
        self._wait_for_outputs(1 - slot, newer)
        self._zero_the_rest()

    def _tile(self, item: jax.Array, index: jax.Array, carry: Any) -> Any:
        cursor, buffer, slot, older, newer = carry
        tile = self.walk.tile(item, index)
        next_item, next_index = self.walk.after_tile(item, index)

        @pl.when(next_item < self.stream.num_live)
        def _() -> None:
            self._q_copy(self.walk.tile(next_item, next_index), 1 - slot).start()

        self._begin_softmax()
        self._q_copy(tile, slot).wait()

        def block(index: jax.Array, carry: tuple[Cursor, jax.Array]) -> tuple[Cursor, jax.Array]:
            cursor, buffer = carry
            buffers = self.walk.blocking.buffers
            # Into the buffer that the block before used.
            spare = jnp.where(buffer == 0, buffers - 1, buffer - 1)
            cursor = self.stream.fetch(cursor, spare)
            self.stream.wait(tile, index, buffer)
            # Most blocks of a long context need no masks, which are a sixth of the work.
            is_whole = self._is_whole(tile, index)
            pl.when(is_whole)(partial(self._block, tile, index, slot, buffer, is_masked=False))
            pl.when(~is_whole)(partial(self._block, tile, index, slot, buffer, is_masked=True))
            return cursor, jnp.where(buffer == buffers - 1, 0, buffer + 1)

        first, end = self.walk.blocks(tile)
        cursor, buffer = lax.fori_loop(first, end, block, (cursor, buffer))
        self._wait_for_outputs(slot, older)
        for head in range(self.heads.kv_heads):
            attended = self.mixed[head] / _widen(self.total[head], self.heads.lanes)
            attended = attended.astype(jnp.bfloat16)
            store_outputs(self.outputs, slot, head, attended, interpret=self.interpret)
        self._o_copy(tile.start, tile.count, slot).start()
        return cursor, buffer, 1 - slot, newer, jnp.asarray(tile.count, jnp.int32)

    def _begin_softmax(self) -> None:
        """As if nothing was seen, or only the sink: a score of weight 1 without a value."""
        self.mixed[...] = jnp.zeros_like(self.mixed)
        if self.sinks is None:
            self.high[...] = jnp.full_like(self.high, LOWEST)
            self.total[...] = jnp.zeros_like(self.total)
            return
        self.total[...] = jnp.ones_like(self.total)
        shape = self.high.shape[1:]
        group = 2 * self.q_hbm.shape[2]
        of_row = group_of_row(lax.broadcasted_iota(jnp.int32, shape, 0), self.walk.blocking.tile)
        for head in range(self.heads.kv_heads):
            sink = jnp.full(shape, self.sinks[head * group], jnp.float32)
            for i in range(1, group):
                sink = jnp.where(of_row == i, self.sinks[head * group + i], sink)
            self.high[head] = sink / unit(self.scoring)

    def _is_whole(self, tile: Tile, block: jax.Array) -> jax.Array:
        """Whether every token of the tile sees the whole block."""
        begin = block * self.walk.blocking.block
        is_whole = begin + self.walk.blocking.block <= tile.position + 1
        if self.scoring.window is not None:
            is_whole &= begin >= tile.end_key - self.scoring.window
        return is_whole

    def _block(
        self,
        tile: Tile,
        block: jax.Array,
        slot: jax.Array,
        buffer: jax.Array,
        *,
        is_masked: bool,
    ) -> None:
        """Takes one block of keys into the running softmax of every head."""
        is_seen = is_alive = None
        if is_masked:
            begin = block * self.walk.blocking.block
            rows, tokens = self.high.shape[1], self.walk.blocking.block
            is_seen = visible(
                tile.position - begin, (rows, tokens), self.walk.blocking.tile, self.scoring.window
            )
            is_alive = alive(
                tile.first_key - begin, tile.end_key - begin, (tokens, self.heads.lanes)
            )
        # The product with the values of a head is issued after the softmax of the next one has
        # begun: they run on different units.
        mix: Callable[[], None] | None = None
        for word in range(self.heads.words):
            low, high = load_halves(
                self.stream.buffers, buffer, word, is_alive, interpret=self.interpret
            )
            in_word = [(word, low, high)]
            if self.heads.is_narrow:  # keys and values share the lanes, queries have zeros there
                in_word = [(2 * word, low, low), (2 * word + 1, high, high)]
            for head, keys, values in in_word:
                if head < self.heads.kv_heads:
                    weights, fade = self._weigh(head, keys, is_seen, slot)
                    if mix is not None:
                        mix()
                    mix = partial(self._mix, head, weights, fade, values)
        assert mix is not None
        mix()

    def _weigh(
        self, head: int, keys: jax.Array, is_seen: jax.Array | None, slot: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Weights of a block's tokens, and what the weights before shrink by."""
        queries = load_queries(self.queries, slot, head, interpret=self.interpret)
        scores = lax.dot_general(
            queries, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        scores = bounded(scores, self.scoring)
        if is_seen is not None:
            scores = jnp.where(is_seen, scores, LOWEST)
        high = self.high[head]
        new_high = jnp.maximum(high, jnp.max(scores, axis=1, keepdims=True))
        weights = weight(scores - _widen(new_high, scores.shape[1]), self.scoring)
        if is_seen is not None and self.scoring.window is not None:
            # A row may see nothing of the block, nor of any before: all its scores are the maximum.
            weights = jnp.where(is_seen, weights, 0.0)
        fade = weight(high - new_high, self.scoring)
        self.high[head] = new_high
        self.total[head] = fade * self.total[head] + jnp.sum(weights, axis=1, keepdims=True)
        return weights.astype(jnp.bfloat16), fade

    def _mix(self, head: int, weights: jax.Array, fade: jax.Array, values: jax.Array) -> None:
        mixed = jnp.dot(weights, values, preferred_element_type=jnp.float32)
        self.mixed[head] = self.mixed[head] * _widen(fade, self.heads.lanes) + mixed

    def _zero_the_rest(self) -> None:
        """Writes zeros for the tokens of items without keys."""
        zero = jnp.int32(0)
        self.outputs[zero] = jnp.zeros(self.outputs.shape[1:], self.outputs.dtype)

        def for_tiles(act: Callable[[Any], None]) -> None:
            def item(index: jax.Array, _: None) -> None:
                def tile(tile_index: jax.Array, _: None) -> None:
                    tile = self.walk.tile(index, tile_index)
                    act(self._o_copy(tile.start, tile.count, zero))

                lax.fori_loop(0, self.walk.num_tiles(index), tile, None)

            lax.fori_loop(self.stream.num_live, self.walk.row.shape[0], item, None)

        for_tiles(lambda copy: copy.start())
        for_tiles(lambda copy: copy.wait())

    def _q_copy(self, tile: Tile, slot: jax.Array) -> Any:
        return pltpu.make_async_copy(
            self.q_hbm.at[pl.ds(tile.start, tile.count)],
            self.queries.at[slot, pl.ds(0, tile.count)],
            self.q_arrived.at[slot],
        )

    def _o_copy(self, start: jax.Array, count: jax.Array | int, slot: jax.Array) -> Any:
        return pltpu.make_async_copy(
            self.outputs.at[slot, pl.ds(0, count)],
            self.o_hbm.at[pl.ds(start, count)],
            self.o_left.at[slot],
        )

    def _wait_for_outputs(self, slot: jax.Array, count: jax.Array) -> None:
        @pl.when(count > 0)
        def _() -> None:
            wait_for(self.outputs.at[slot, pl.ds(0, count)], self.o_left.at[slot])


def _widen(rows: jax.Array, lanes: int) -> jax.Array:
    """Rows that are the same in all their lanes, with another number of lanes."""
    if lanes <= rows.shape[1]:
        return rows[:, :lanes]
    return jnp.concatenate([rows] * (lanes // rows.shape[1]), axis=1)

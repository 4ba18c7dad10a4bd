"""Streams the KV blocks of a walk from HBM through a ring of VMEM buffers, ahead of their use.

The stream has a cursor of its own that runs some blocks ahead, across tiles and items, so that
memory is busy while short rows begin and end. Page numbers come from a table in scalar memory; one
that is too large for it is read from HBM a row at a time, the next row while one is in use.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tpu_cache import wait_for
from .tpu_tiles import Tile, TileWalk

Cursor = tuple[jax.Array, jax.Array, jax.Array]
"""Item, tile and block that is fetched next."""


@dataclass(frozen=True)
class PageStream:
    """Refs of one kernel, and the walk that they serve.

    Attributes:
      walk: Which blocks, in which order.
      num_live: Items that have keys.
      page_table: In scalar memory, flat; or in HBM, [rows, 1, columns].
      columns: Of the page table.
      pages: The cache, in HBM.
      buffers: [buffers, block, words or more, 2, lanes] in VMEM.
      arrived: A semaphore per buffer.
      table_rows: Two rows of a page table in HBM, in scalar memory; None where it is there whole.
      row_arrived: A semaphore for each of them.
    """

    walk: TileWalk
    num_live: jax.Array
    page_table: Any
    columns: int
    pages: Any
    buffers: Any
    arrived: Any
    table_rows: Any
    row_arrived: Any

    def begin(self) -> Cursor:
        """Starts as many blocks as there are buffers to spare."""
        zero = jnp.int32(0)
        if self.table_rows is not None:
            self._start_table_row(zero)
        cursor = zero, zero, self.walk.blocks(self.walk.tile(zero, zero))[0]
        for buffer in range(self.buffers.shape[0] - 1):
            cursor = self.fetch(cursor, jnp.int32(buffer))
        return cursor

    def fetch(self, cursor: Cursor, buffer: jax.Array) -> Cursor:
        """Starts the block at the cursor, if there is one, and moves the cursor on."""
        item, index, block = cursor
        tile = self.walk.tile(item, index)
        first_block, end_block = self.walk.blocks(tile)

        @pl.when(item < self.num_live)
        def _() -> None:
            if self.table_rows is not None:

                @pl.when((index == 0) & (block == first_block))
                def _() -> None:
                    wait_for(self._table_row(item), self.row_arrived.at[item % 2])
                    self._start_table_row(item + 1)

            first, end = self.walk.pages(tile, block)
            pages_per_block = self.walk.blocking.block // self.walk.page_size

            def start(column: jax.Array, _: None) -> None:
                pltpu.make_async_copy(
                    self.pages.at[self._page(item, tile, column)],
                    self._place(buffer, column - block * pages_per_block, 1),
                    self.arrived.at[buffer],
                ).start()

            lax.fori_loop(first, end, start, None)

        next_item, next_index = self.walk.after_tile(item, index)
        next_first, _ = self.walk.blocks(self.walk.tile(next_item, next_index))
        is_last = block + 1 >= end_block
        return (
            jnp.where(is_last, next_item, item),
            jnp.where(is_last, next_index, index),
            jnp.where(is_last, next_first, block + 1),
        )

    def wait(self, tile: Tile, block: jax.Array, buffer: jax.Array) -> None:
        """Waits until a block is there: one wait for the bytes of its pages."""
        first, end = self.walk.pages(tile, block)
        wait_for_pages(self._place(buffer, 0, end - first), self.arrived.at[buffer])

    def _place(self, buffer: jax.Array, page: jax.Array | int, count: jax.Array | int) -> Any:
        """Where pages of a block lie in a buffer."""
        page_size, words = self.pages.shape[1:3]
        tokens = pl.ds(page * page_size, count * page_size)
        return self.buffers.at[buffer, tokens, pl.ds(0, words)]

    def _page(self, item: jax.Array, tile: Tile, column: jax.Array) -> jax.Array:
        if self.table_rows is None:
            return self.page_table[tile.row * self.columns + column]
        return self.table_rows[item % 2, 0, column]

    def _table_row(self, item: jax.Array) -> Any:
        return self.table_rows.at[item % 2]

    def _start_table_row(self, item: jax.Array) -> None:
        @pl.when(item < self.num_live)
        def _() -> None:
            row = self.page_table.at[self.walk.tile(item, jnp.int32(0)).row]
            semaphore = self.row_arrived.at[item % 2]
            pltpu.make_async_copy(row, self._table_row(item), semaphore).start()


def wait_for_pages(place: Any, arrived: Any) -> None:
    """The one wait between pages on their way and their use."""
    wait_for(place, arrived)

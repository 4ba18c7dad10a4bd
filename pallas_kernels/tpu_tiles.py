"""How a kernel walks its work list: items, the tiles of an item, and the KV blocks of a tile.

All numbers are scalars in scalar memory. A tile is a few query tokens of one item that share one
pass over the keys they see: from the first key of its first token, by whole pages, to the last key
of its last token.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .tpu_budget import Blocking


def ceil_div(a: jax.Array, b: int) -> jax.Array:
    """Of numbers that are not negative."""
    return lax.div(a + (b - 1), jnp.int32(b))


@dataclass(frozen=True)
class Tile:
    """Query tokens that share one pass over their keys.

    Attributes:
      row: Row of the page table.
      start: First of its tokens in the kernel's queries.
      count: How many tokens; at least 1.
      position: Position of its first token in the request.
      first_key: First position that its first token sees.
      end_key: End of what its last token sees.
    """

    row: jax.Array
    start: jax.Array
    count: jax.Array | int
    position: jax.Array
    first_key: jax.Array
    end_key: jax.Array


@dataclass(frozen=True)
class TileWalk:
    """Reads the work list. The order: item by item, tile by tile, block by block.

    Attributes:
      row, start, q_len, kv_len: Of TpuWork, in scalar memory.
      blocking: How items are cut.
      page_size: Tokens per page.
      window: Tokens that a query sees, or None.
    """

    row: Any
    start: Any
    q_len: Any
    kv_len: Any
    blocking: Blocking
    page_size: int
    window: int | None

    def num_tiles(self, item: jax.Array) -> jax.Array | int:
        """Tiles of an item; past the last item, some number."""
        if self.blocking.tile == 1:
            return 1
        return ceil_div(self.q_len[self._existing(item)], self.blocking.tile)

    def tile(self, item: jax.Array, index: jax.Array | int) -> Tile:
        """A tile of an item; past the last item, some tile."""
        item = self._existing(item)
        kv_len = self.kv_len[item]
        if self.blocking.tile == 1:
            offset, count, position = 0, 1, kv_len - 1
        else:
            q_len = self.q_len[item]
            offset = index * self.blocking.tile
            count = jnp.minimum(q_len - offset, self.blocking.tile)
            position = kv_len - q_len + offset
        first_key = jnp.int32(0)
        if self.window is not None:
            first_key = jnp.maximum(position + 1 - self.window, 0)
        return Tile(
            row=self.row[item],
            start=self.start[item] + offset,
            count=count,
            position=position,
            first_key=first_key,
            end_key=position + count,
        )

    def blocks(self, tile: Tile) -> tuple[jax.Array, jax.Array]:
        """The blocks that hold what a tile sees: [first, end)."""
        block = self.blocking.block
        return lax.div(tile.first_key, jnp.int32(block)), ceil_div(tile.end_key, block)

    def pages(self, tile: Tile, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The pages of a block that hold what a tile sees: [first, end) columns of the table.

        Outside of them the page table may hold anything, and is not read.
        """
        pages_per_block = self.blocking.block // self.page_size
        first = jnp.maximum(
            block * pages_per_block, lax.div(tile.first_key, jnp.int32(self.page_size))
        )
        end = jnp.minimum((block + 1) * pages_per_block, ceil_div(tile.end_key, self.page_size))
        return first, end

    def after_tile(self, item: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Item and index of the tile after one."""
        if self.blocking.tile == 1:
            return item + 1, index
        is_last = index + 1 >= self.num_tiles(item)
        return jnp.where(is_last, item + 1, item), jnp.where(is_last, 0, index + 1)

    def _existing(self, item: jax.Array) -> jax.Array:
        # A walk that runs ahead looks past the last item, where scalar memory ends.
        return jnp.minimum(item, self.row.shape[0] - 1)

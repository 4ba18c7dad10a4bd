"""Pages on their way into shared memory: a ring of tiles that is read while the next ones arrive.

One copy brings keys and values of a head for a box of tokens: what page and tile have in common.
Hopper and later copy with the tensor memory accelerator and wait at a barrier in shared memory;
Ampere copies with cp.async and waits for groups of copies. Nothing else differs between them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

Scalar = Int32[Array, ""]


@dataclass(frozen=True)
class PageRing:
    """Static shape of the ring, and how it is filled.

    Attributes:
      page_size: Tokens per page.
      tile: Tokens per slot.
      stages: Slots.
      width: Of a head in the pages.
      has_tma: Whether the tensor memory accelerator copies.
    """

    page_size: int
    tile: int
    stages: int
    width: int
    has_tma: bool

    @property
    def box(self) -> int:
        """Tokens that one copy brings: they lie in one page and one tile."""
        return math.gcd(self.page_size, self.tile)

    @property
    def copies(self) -> int:
        """Copies that fill a slot."""
        return self.tile // self.box

    def scratch(self) -> dict[str, Any]:
        """Shared memory: the slots, and where the accelerator copies a barrier for each."""
        # Rows of 128 bytes, swizzled: a warp's ldmatrix meets no bank twice.
        layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        shape = (self.stages, self.tile, 2 * self.width)
        scratch: dict[str, Any] = {"slots": plgpu.SMEM(shape, jnp.bfloat16, transforms=layout)}
        if self.has_tma:
            scratch["barriers"] = plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages)
        return scratch


@dataclass(frozen=True)
class Pages:
    """One head of one request, as a kernel sees it.

    Attributes:
      ring: How it is copied.
      kv: [pages, page_size, heads * 2 * width] in device memory.
      page_of: Gives the page of a column of the request's table.
      kv_len: Tokens that may be read; over 0 where anything is.
      head: Which kv head.
      slots: Shared memory of the ring.
      barriers: One for each slot; None where cp.async copies.
    """

    ring: PageRing
    kv: Any
    page_of: Callable[[Scalar], Scalar]
    kv_len: Scalar
    head: Scalar
    slots: Any
    barriers: Any


def box_place(ring: PageRing, tile: Scalar, copy: int, kv_len: Scalar) -> tuple[Scalar, Scalar]:
    """Column of the page table and offset in the page where a copy of a tile begins.

    A copy past the last token repeats the last box: whatever the table holds there is never used.
    """
    last = lax.div(kv_len - 1, jnp.int32(ring.box))
    box = jnp.minimum(tile * ring.copies + copy, last)
    boxes = jnp.int32(ring.page_size // ring.box)
    return lax.div(box, boxes), lax.rem(box, boxes) * ring.box


def start(pages: Pages, tile: Scalar, slot: Scalar | int) -> None:
    """Starts the copies of a tile into a slot that nobody reads any more."""
    ring = pages.ring
    columns = 2 * ring.width
    column = pl.multiple_of(pages.head * columns, columns)
    for copy in range(ring.copies):
        entry, offset = box_place(ring, tile, copy, pages.kv_len)
        offset = pl.multiple_of(offset, ring.box)
        source = pages.kv.at[pages.page_of(entry), pl.ds(offset, ring.box), pl.ds(column, columns)]
        # Both ends are whole: a slice of all of a slot would be one more thing to prove.
        target = pages.slots.at[slot]
        if ring.copies > 1:
            target = pages.slots.at[slot, pl.ds(copy * ring.box, ring.box)]
        if ring.has_tma:
            plgpu.copy_gmem_to_smem(source, target, pages.barriers.at[slot])
        else:
            in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            plgpu.copy_gmem_to_smem(source, target, oob_mode=in_bounds)


def wait(pages: Pages, slot: Scalar, tiles_left: Scalar) -> None:
    """Waits until a slot is full.

    Args:
      pages: What is read.
      slot: The slot.
      tiles_left: Tiles from this one on, itself included.
    """
    ring = pages.ring
    if ring.has_tma:
        plgpu.barrier_wait(pages.barriers.at[slot])
        return
    # Each copy is a group. While the ring is full, stages - 2 tiles are behind this one; at the end
    # there are fewer, and all of them are waited for.
    full = tiles_left >= ring.stages - 1
    pl.when(full)(partial(plgpu.wait_gmem_to_smem, (ring.stages - 2) * ring.copies))
    pl.when(~full)(partial(plgpu.wait_gmem_to_smem, 0))


def release(ring: PageRing) -> None:
    """Orders what was read from a slot before the copies that overwrite it."""
    # cp.async is ordered like a store, and the barrier behind its wait came after the reads.
    if ring.has_tma:
        plgpu.commit_smem()


def read_tiles[Carry](
    pages: Pages,
    first: Scalar,
    last: Scalar,
    read: Callable[[Scalar, Scalar, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Runs `read(tile, slot, carry)` over tiles [first, last) while the next ones are copied."""
    ring = pages.ring
    for ahead in range(ring.stages - 1):
        pl.when(first + ahead < last)(partial(start, pages, first + ahead, ahead))

    def step(tile: jax.Array, carry: Carry) -> Carry:
        slot = lax.rem(tile - first, jnp.int32(ring.stages))
        wait(pages, slot, last - tile)
        ahead = tile + (ring.stages - 1)

        @pl.when(ahead < last)
        def _() -> None:
            release(ring)
            start(pages, ahead, lax.rem(ahead - first, jnp.int32(ring.stages)))

        return read(tile, slot, carry)

    return lax.fori_loop(first, last, step, carry)

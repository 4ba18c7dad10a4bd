"""Work lists of the TPU kernels: what one step's items are, built once before the layers.

An item is a run of query tokens of one request: a decode row is an item of one token, a segment of
the chunk one of several, and what is left of the chunk is an item without keys. Items with keys
come first; the kernels cut them into tiles themselves and give zeros for the rest.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from .chunk_tokens import Segments
from .tpu_budget import table_fits_smem


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TpuWork:
    """The items of one kernel call. Those with keys come first, in their order.

    Attributes:
      row: Row of the page table of each item.
      start: First query token of each item.
      q_len: Query tokens of each item.
      kv_len: Tokens that its last query token sees; 0: none, the item gives zeros.
      num_live: How many items have keys; one number, as the kernel reads it.
      page_table: Flat where it fits scalar memory; else [rows, 1, columns], of which the kernel
        fetches a row at a time.
      columns: Of the page table.
    """

    row: Int32[Array, " items"]
    start: Int32[Array, " items"]
    q_len: Int32[Array, " items"]
    kv_len: Int32[Array, " items"]
    num_live: Int32[Array, "1"]
    page_table: Int32[Array, " entries"] | Int32[Array, "rows 1 columns"]
    columns: int = field(metadata={"static": True})


def decode_work(
    page_table: Int32[Array, "rows columns"], kv_lens: Int32[Array, " rows"]
) -> TpuWork:
    """One item per row."""
    row = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    return _live_first(page_table, row, jnp.ones_like(row), kv_lens)


def prefill_work(segments: Segments, chunk: int) -> TpuWork:
    """One item per segment, and one for the padding behind them."""
    ends = jnp.cumsum(segments.q_lens)
    used = ends[-1:].astype(jnp.int32)
    start = jnp.concatenate([ends - segments.q_lens, used]).astype(jnp.int32)
    q_len = jnp.concatenate([segments.q_lens, chunk - used])
    kv_len = jnp.concatenate([jnp.where(segments.q_lens > 0, segments.kv_lens, 0), 0 * used])
    return _live_first(segments.page_table, start, q_len, kv_len)


def _live_first(
    page_table: Int32[Array, "rows columns"],
    start: Int32[Array, " items"],
    q_len: Int32[Array, " items"],
    kv_len: Int32[Array, " items"],
) -> TpuWork:
    rows, columns = page_table.shape
    is_live = kv_len > 0
    order = stable_partition(is_live)
    return TpuWork(
        # Of the item of padding too there has to be a row, though nothing is read from it.
        row=jnp.minimum(order, rows - 1),
        start=start[order],
        q_len=q_len[order],
        kv_len=kv_len[order],
        num_live=is_live.sum(dtype=jnp.int32)[None],
        page_table=page_table.reshape(-1)
        if table_fits_smem(rows, columns)
        else page_table.reshape(rows, 1, columns),
        columns=columns,
    )


def stable_partition(is_first: Bool[Array, " items"]) -> Int32[Array, " items"]:
    """Indices of the items that are first, then of the others, each in order."""
    index = jnp.arange(is_first.shape[0], dtype=jnp.int32)
    rank = jnp.where(
        is_first,
        jnp.cumsum(is_first) - 1,
        is_first.sum() + jnp.cumsum(~is_first) - 1,
    )
    # A comparison of all pairs: a few hundred items, and no sort or scatter to compile.
    return jnp.where(rank == index[:, None], index, 0).sum(-1, dtype=jnp.int32)

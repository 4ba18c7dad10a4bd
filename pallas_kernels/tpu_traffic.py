"""Bytes that the TPU kernels move between HBM and the chip, and the least that would do.

Host arithmetic for plans and reports: what one item of a work list costs, by the rules of TileWalk.
"""

from dataclasses import dataclass

from .backend import KVShape
from .tpu_budget import choose_blocking, padded_group
from .tpu_cache import HeadLayout


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one item in one layer on one device.

    Attributes:
      kv_bytes: Whole pages read, each tile's anew.
      q_and_o_bytes: Queries read and outputs written, padding included.
      least_bytes: Every key and value that is seen once, every query and output once, no padding.
    """

    kv_bytes: int
    q_and_o_bytes: int
    least_bytes: int

    @property
    def ratio(self) -> float:
        """How many times the least is moved."""
        return (self.kv_bytes + self.q_and_o_bytes) / self.least_bytes


def item_traffic(
    kv: KVShape, group: int, *, q_len: int, kv_len: int, window: int | None, item_tokens: int
) -> Traffic:
    """The traffic of one decode row or one segment.

    Args:
      kv: The pages.
      group: Query heads per kv head.
      q_len: Query tokens; 1 for a decode row.
      kv_len: Tokens that the last of them sees.
      window: Tokens that a query sees, or None.
      item_tokens: Most query tokens of an item of this kernel; 1: decode.
    """
    heads = HeadLayout(kv.kv_heads, kv.head_dim)
    tile = choose_blocking(heads, group, kv.page_size, item_tokens).tile
    pages = 0
    for offset in range(0, q_len, tile):
        position = kv_len - q_len + offset
        first_key = 0 if window is None else max(position + 1 - window, 0)
        end_key = position + min(tile, q_len - offset)
        pages += -(-end_key // kv.page_size) - first_key // kv.page_size
    seen = kv_len if window is None else min(kv_len, window + q_len - 1)
    return Traffic(
        kv_bytes=pages * kv.page_size * heads.token_bytes,
        q_and_o_bytes=2 * q_len * kv.kv_heads * padded_group(group) * heads.lanes * 2,
        least_bytes=2 * kv.head_dim * kv.kv_heads * (2 * seen + 2 * q_len * group),
    )

"""Bytes that the TPU kernels move: what one item of a work list costs, by the rules of TileWalk."""

from octavo.pallas_kernels.backend import KVShape
from octavo.pallas_kernels.tpu_budget import choose_blocking, padded_group
from octavo.pallas_kernels.tpu_cache import HeadLayout

from .traffic import Traffic


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
        other_bytes=2 * q_len * kv.kv_heads * padded_group(group) * heads.lanes * 2,
        least_bytes=2 * kv.head_dim * kv.kv_heads * (2 * seen + 2 * q_len * group),
    )

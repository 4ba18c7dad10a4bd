"""What the TPU kernels keep on the chip, computed from shapes: tiles, blocks, buffers, refusals.

VMEM holds the tile's queries, outputs and running softmax, and a few blocks of KV of which all but
one are on their way. From v5 on every chip has 64 MiB of VMEM or more, and XLA prefetches weights
into the rest of it; so one budget, well below that, serves all, and results do not depend on it.
"""

from dataclasses import dataclass

from .backend import AttentionShape, heads_refusal
from .tpu_cache import LANES, HeadLayout

VMEM_LIMIT_BYTES = 32 << 20  # what the compiler may use in one kernel
VMEM_BUDGET_BYTES = 16 << 20  # what is planned for, by the count of `vmem_bytes`
SMEM_BYTES = 1 << 20  # of every chip
SMEM_RESERVED_BYTES = 64 << 10  # for what the compiler keeps there itself
TILE_ROWS = 256  # rows of a score matrix that is not cut by the budget: tile tokens times group
BLOCK_BYTES = 2 << 20  # of KV in one step: enough to hide what a step costs beside its bytes
MIN_BLOCK_TOKENS, MAX_BLOCK_TOKENS = 128, 1024
BUFFERS_BYTES = 6 << 20  # of KV in all buffers
MAX_BUFFERS = 4
MAX_GROUP = 16
MAX_HEAD_DIM = 256
MAX_PAGE_SIZE = 1024
# As JAX calls devices with 16 MiB of VMEM; the first two cannot copy within HBM either. Whatever is
# not here counts as newer.
OLD_DEVICE_KINDS = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")
MAX_ITEMS = 4096  # decode rows or segments: four numbers of each lie in scalar memory


@dataclass(frozen=True, kw_only=True)
class Blocking:
    """How one kernel cuts its work. All static.

    Attributes:
      tile: Query tokens that share one pass over their keys; a power of two.
      block: KV tokens of one step; whole pages.
      buffers: Blocks of KV that VMEM holds, one in use and the others on their way.
    """

    tile: int
    block: int
    buffers: int


def padded_group(group: int) -> int:
    """Query heads per kv head as they lie in memory: pairs, which share 32-bit words."""
    return group + group % 2


def choose_blocking(heads: HeadLayout, group: int, page_size: int, tokens: int) -> Blocking:
    """The largest tile and block that the budget allows.

    Args:
      heads: The kv heads of one device.
      group: Query heads per kv head.
      page_size: Tokens per page; a power of two.
      tokens: Most query tokens of one item; 1: decode, whose tile is 1, and only then.
    """
    smallest_tile = min(tokens, 2)
    block = _power_of_two_below(BLOCK_BYTES // heads.token_bytes)
    block = max(min(max(block, MIN_BLOCK_TOKENS), MAX_BLOCK_TOKENS), page_size)
    tile = min(
        _power_of_two_below(TILE_ROWS // padded_group(group)),
        _power_of_two_below(2 * tokens - 1),
    )
    while True:
        buffers = BUFFERS_BYTES // (block * heads.token_bytes)
        blocking = Blocking(tile=tile, block=block, buffers=min(max(buffers, 2), MAX_BUFFERS))
        if vmem_bytes(blocking, heads, group) <= VMEM_BUDGET_BYTES:
            return blocking
        if tile * padded_group(group) > LANES:
            tile //= 2
        elif block > max(MIN_BLOCK_TOKENS, page_size):
            block //= 2
        elif tile > smallest_tile:
            tile //= 2
        else:
            return blocking


def vmem_bytes(blocking: Blocking, heads: HeadLayout, group: int) -> int:
    """What a kernel needs in VMEM: its buffers, and values that do not fit the registers."""
    rows = blocking.tile * padded_group(group)
    sublanes = max(rows, 8)
    kv = blocking.buffers * blocking.block * buffer_words(heads.words) * heads.lanes * 4
    q_and_o = 2 * 2 * heads.kv_heads * rows * heads.lanes * 2
    softmax = heads.kv_heads * sublanes * (2 * LANES + heads.lanes) * 4
    # Two heads are under way at a time: scores and weights of each, keys and values of one.
    values = 4 * sublanes * blocking.block * 4 + 2 * blocking.block * heads.lanes * 4
    return kv + q_and_o + softmax + values


def buffer_words(words: int) -> int:
    """Words between tokens in a VMEM buffer: odd, so that a strided load meets every bank.

    With 8 words, a load of one word of many tokens meets every fourth of the 32 banks and takes
    twice as long.
    """
    return words | 1


def table_fits_smem(rows: int, columns: int) -> bool:
    """Whether a page table lies in scalar memory as a whole, beside the work list."""
    return 4 * rows * columns + _work_bytes(rows + 1) <= SMEM_BYTES - SMEM_RESERVED_BYTES


def refusal(device_kind: str, shape: AttentionShape) -> str | None:
    """Why the TPU kernels cannot run a shape on a chip: field, value and bound. None: they can."""
    kv = shape.kv
    if device_kind in OLD_DEVICE_KINDS:
        return (
            f"device_kind {device_kind}: must be TPU v5 or newer, for {VMEM_LIMIT_BYTES >> 20} MiB "
            "of VMEM"
        )
    if kv.dtype != "bfloat16":
        return f"dtype {kv.dtype}: must be bfloat16, of which two share a 32-bit word"
    refused = heads_refusal(shape, max_head_dim=MAX_HEAD_DIM, max_group=MAX_GROUP)
    if refused is not None:
        return refused
    if not 1 <= kv.page_size <= MAX_PAGE_SIZE or kv.page_size & (kv.page_size - 1):
        return f"page_size {kv.page_size}: must be a power of two in [1, {MAX_PAGE_SIZE}]"
    for name, items in (("rows", shape.rows), ("segments", shape.segments)):
        if items >= MAX_ITEMS:
            return f"{name} {items}: must be below {MAX_ITEMS}"
    # A row of the page table in use and one on its way.
    most_columns = (SMEM_BYTES - SMEM_RESERVED_BYTES - _work_bytes(MAX_ITEMS)) // 8
    if shape.pages_per_seq > most_columns:
        return f"pages_per_seq {shape.pages_per_seq}: at most {most_columns}"
    heads, group = HeadLayout(kv.kv_heads, kv.head_dim), shape.q_heads // kv.kv_heads
    for tokens in (1, max(shape.chunk, 2)):
        needed = vmem_bytes(choose_blocking(heads, group, kv.page_size, tokens), heads, group)
        if needed > VMEM_BUDGET_BYTES:
            return (
                f"kv_heads {kv.kv_heads} of head_dim {kv.head_dim} with page_size {kv.page_size}: "
                f"{needed} bytes of VMEM, at most {VMEM_BUDGET_BYTES}"
            )
    return None


def _work_bytes(items: int) -> int:
    return 4 * 4 * items


def _power_of_two_below(n: int) -> int:
    """The largest power of two that is at most n, and at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)

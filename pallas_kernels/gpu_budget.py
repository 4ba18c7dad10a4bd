"""What the GPU kernels take of a chip: tiles, ring slots, splits and shared memory, from shapes.

Nothing here is a table of tuned numbers. A kernel's tile is as wide as its registers allow without
a spill, its ring as deep as lets two blocks share a multiprocessor (two slots at least), and its
splits as many as fill the chip once.
"""

from dataclasses import dataclass, replace

from .backend import AttentionShape, UnsupportedShape, heads_refusal

# Compute capability: KiB of shared memory of a multiprocessor. Those that the kernels compile for.
SHARED_KIB = {80: 164, 90: 228, 100: 228}
RESERVED_BYTES = 1024  # of each block, by CUDA
BLOCKS_PER_SM = 2  # where they fit: one computes while the other waits for its pages

HEAD_DIMS = (64, 128, 256)  # widths of a head in the pages; others are padded with zeros
MAX_GROUP = 16  # query heads per kv head: rows of one tensor core product
QUERIES = 64  # of one block of the prefill kernel: tokens times query heads per kv head
THREADS = 128  # of a block: one warpgroup
MAX_STAGES = 4  # more slots than this hide no more latency
MAX_SPLITS = 64
MAX_GRID = 65535  # blocks along all but the last axis of a grid

_ALIGNMENT = 1024  # of every allocation in shared memory
_REDUCTION_BYTES = 2048  # what Mosaic keeps to reduce across warps


@dataclass(frozen=True)
class GpuChip:
    """What the budgets depend on.

    Attributes:
      compute_capability: Ten times major plus minor: 80 is Ampere, 90 Hopper, 100 Blackwell. 0: not
        a CUDA device.
      num_sms: Multiprocessors.
    """

    compute_capability: int
    num_sms: int

    @property
    def has_tma(self) -> bool:
        """Whether pages are copied by the tensor memory accelerator; else by cp.async."""
        return self.compute_capability >= 90

    def block_bytes(self, blocks: int) -> int:
        """Shared memory of a block where so many share a multiprocessor."""
        return SHARED_KIB[self.compute_capability] * 1024 // blocks - RESERVED_BYTES


@dataclass(frozen=True)
class KernelPlan:
    """Static sizes of one kernel.

    Attributes:
      kv_tile: KV tokens that a block takes at a time.
      stages: Tiles in its ring.
      splits: Blocks that share the KV of one row and head; 1 in prefill.
      shared_bytes: Shared memory of a block.
    """

    kv_tile: int
    stages: int
    splits: int
    shared_bytes: int


def padded_head_dim(head_dim: int) -> int:
    """Width of a head in the pages.

    Raises:
      UnsupportedShape: It is wider than the widest.
    """
    for width in HEAD_DIMS:
        if head_dim <= width:
            return width
    raise UnsupportedShape(f"head_dim {head_dim}: must be in [1, {HEAD_DIMS[-1]}]")


def kv_tile(width: int) -> int:
    """KV tokens that a block takes at a time: what the registers hold without a spill."""
    return 64 if width <= 128 else 32


def decode_plan(
    chip: GpuChip, *, rows: int, kv_heads: int, width: int, max_tokens: int
) -> KernelPlan:
    """Sizes of the decode kernel.

    Args:
      chip: Where it runs.
      rows: Decode rows.
      kv_heads: Of this device.
      width: Of a head in the pages.
      max_tokens: What a page table can hold.
    """
    tile = kv_tile(width)
    # Weights of 16 query heads in bfloat16, and the block's result on its way out in float32.
    fixed = _aligned(MAX_GROUP * tile * 2) + _aligned(MAX_GROUP * width * 4)
    fixed += _REDUCTION_BYTES + _barrier_bytes(chip)
    plan = _with_ring(chip, tile=tile, width=width, fixed=fixed)
    blocks_per_sm = BLOCKS_PER_SM if plan.shared_bytes <= chip.block_bytes(BLOCKS_PER_SM) else 1
    splits = blocks_per_sm * chip.num_sms // (rows * kv_heads)
    return replace(plan, splits=max(1, min(splits, MAX_SPLITS, -(-max_tokens // tile))))


def holds_queries(width: int) -> bool:
    """Whether a prefill block keeps its queries in registers; wider ones are read for each tile."""
    return width <= 128


def prefill_plan(chip: GpuChip, width: int) -> KernelPlan:
    """Sizes of the prefill kernel."""
    tile = kv_tile(width)
    # Weights of the tile, results of a tile that is not full, and queries that have no registers.
    fixed = _aligned(QUERIES * tile * 2) + _aligned(QUERIES * 64 * 2) + _barrier_bytes(chip)
    fixed += 0 if holds_queries(width) else _aligned(QUERIES * width * 2)
    return _with_ring(chip, tile=tile, width=width, fixed=fixed)


def refusal(chip: GpuChip, shape: AttentionShape) -> str | None:
    """Why the kernels cannot run a shape on a chip: field, value and bound. None: they can."""
    kv = shape.kv
    if chip.compute_capability not in SHARED_KIB:
        return f"compute_capability {chip.compute_capability}: must be in {sorted(SHARED_KIB)}"
    if kv.dtype != "bfloat16":
        return f"dtype {kv.dtype}: must be bfloat16, which the products are made for"
    refused = heads_refusal(shape, max_head_dim=HEAD_DIMS[-1], max_group=MAX_GROUP)
    if refused is not None:
        return refused
    # Swizzled rows go by 8. cp.async deals tiles of 8 by 64 to four warps, and wants one for each.
    rows = 16 if padded_head_dim(kv.head_dim) == 64 and not chip.has_tma else 8
    if kv.page_size < 1 or kv.page_size % rows:
        return f"page_size {kv.page_size}: must be a multiple of {rows}"
    if shape.rows > MAX_GRID:
        return f"rows {shape.rows}: at most {MAX_GRID}"
    return None


def _with_ring(chip: GpuChip, *, tile: int, width: int, fixed: int) -> KernelPlan:
    """As many slots as two blocks per multiprocessor leave room for, and at least two; one split.

    So all chips that are named have room for a block of every width.
    """
    slot = tile * 2 * width * 2
    stages = max(2, min(MAX_STAGES, (chip.block_bytes(BLOCKS_PER_SM) - fixed) // slot))
    return KernelPlan(tile, stages, 1, fixed + stages * slot)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _barrier_bytes(chip: GpuChip) -> int:
    return _ALIGNMENT if chip.has_tma else 0

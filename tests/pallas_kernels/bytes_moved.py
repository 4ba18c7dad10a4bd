"""Prints how many times the least bytes attention moves, for the shape of Llama 3.1 8B.

    python -m tests.pallas_kernels.bytes_moved

On TPUs pages of 128 tokens, on an H100 pages of 64.
"""

from octavo.pallas_kernels.backend import KVShape
from octavo.pallas_kernels.gpu_budget import GpuChip, decode_plan, prefill_plan
from octavo.server.table import format_table

from .gpu_traffic import decode_row_traffic, prefill_tile_traffic
from .tpu_traffic import item_traffic

HEADER = ["what", "TPU", "GPU"]
_H100 = GpuChip(compute_capability=90, num_sms=132)
_TPU_KV = KVShape(kv_heads=8, head_dim=128, page_size=128, dtype="bfloat16")
_ON_GPU = {"page_size": 64, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "width": 128}


def main() -> None:
    """Prints the table."""
    rows = [_decode_row(num_rows, kv_len) for num_rows in (1, 64) for kv_len in (100, 4033, 4096)]
    rows += [_tile(kv_len) for kv_len in (64, 256, 4096)]
    print(format_table(HEADER, rows))


def _decode_row(num_rows: int, kv_len: int) -> list[str]:
    on_tpu = item_traffic(_TPU_KV, 4, q_len=1, kv_len=kv_len, window=None, item_tokens=1)
    plan = decode_plan(_H100, rows=num_rows, kv_heads=8, width=128, max_tokens=8192)
    on_gpu = decode_row_traffic(plan, kv_len=kv_len, **_ON_GPU)
    what = f"a decode row of {kv_len} tokens, one of {num_rows}"
    return [what, f"{on_tpu.ratio:.3f}", f"{on_gpu.ratio:.3f}"]


def _tile(kv_len: int) -> list[str]:
    on_tpu = item_traffic(_TPU_KV, 4, q_len=64, kv_len=kv_len, window=None, item_tokens=256)
    plan = prefill_plan(_H100, 128)
    on_gpu = prefill_tile_traffic(plan, first_position=kv_len - 64, **_ON_GPU)
    return [f"64 prompt tokens up to {kv_len}", f"{on_tpu.ratio:.3f}", f"{on_gpu.ratio:.3f}"]


if __name__ == "__main__":
    main()

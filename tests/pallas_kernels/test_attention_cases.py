"""What the cases can tell apart: a backend that loses a token must fail them, however long the row.

Fails if values at borders become as quiet as all others: one of hundreds is within the tolerance.
"""

from dataclasses import replace

import numpy as np
import pytest

from .attention_cases import (
    EVERYTHING,
    Case,
    Options,
    Shape,
    attention,
    loudness,
    make_case,
    pages_after,
)
from .attention_checks import TOLERANCE

SHAPE = Shape(rows=1, chunk=0, page_size=64, kv_heads=1, group=2, head_dim=64, dtype="bfloat16")


def history(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values that the first row sees, in float64."""
    options, kv_len = case.shape.options, case.kv_lens[0]
    pages = case.page_table[0, : -(-kv_len // case.shape.page_size)]
    k, v = (
        stored[pages].reshape(-1, *stored.shape[2:])[:kv_len].astype(np.float64)
        for stored in pages_after(case)
    )
    return k * (options.k_scale or 1.0), v * (options.v_scale or 1.0)


@pytest.mark.parametrize(
    "options",
    [Options(), Options(window=160), Options(softcap=2.0), Options(sinks=True), EVERYTHING],
    ids=str,
)
@pytest.mark.parametrize("kv_len", [2, 17, 64, 65, 129, 385, 520])
def test_a_token_lost_at_a_border_is_no_rounding(kv_len: int, options: Options):
    shape = replace(SHAPE, options=options)
    case = make_case(shape, [kv_len])
    k, v = history(case)
    seen_from = 0 if options.window is None else max(0, kv_len - options.window)
    all_seen = replace(shape, options=replace(options, window=None))

    def error(kept: list[int]) -> float:
        found = attention(case.q, k[kept], v[kept], case.sinks, all_seen)
        return (np.abs(found - case.expected) / np.maximum(1.0, np.abs(case.expected))).max()

    seen = list(range(seen_from, kv_len))
    assert error(seen) < 1e-9
    loud = [at for at in seen if loudness(shape, kv_len, 1)[at] > 1 or kv_len < 8]
    errors = {lost: error([at for at in seen if at != lost]) for lost in loud}
    assert min(errors.values()) > TOLERANCE["bfloat16"]
    if seen_from:
        assert error([seen_from - 1, *seen]) > TOLERANCE["bfloat16"]

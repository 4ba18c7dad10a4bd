"""Lower bounds from bytes and flops, beside numbers worked out by hand.

Breaks when a bound is above what a step could take, or so far below that it says nothing.
"""

import dataclasses

import pytest

from octavo.configs.chips import CHIPS, Chip
from octavo.configs.model_config import ModelConfig
from octavo.engine.plan_bounds import Bound, Costs, decode_bound, prefill_bound

MODEL = ModelConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=4096,
)
LAYER = 64 * 64 + 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128  # q, output, k and v, MLP
HEAD = 1000 * 64
COSTS = Costs(
    model=MODEL,
    chip=dataclasses.replace(CHIPS["h100"], bytes_per_s=1e9, bf16_flops=1e12, link_bytes_per_s=1e9),
    num_devices=1,
    page_size=16,
    page_bytes=16 * 2 * 2 * 32 * 2,
    parameter_bytes=2 * (2 * LAYER + 2 * HEAD),
    weight_size=2,
)


def check(bound: Bound | None, seconds: float, limited_by: str) -> None:
    assert bound is not None
    assert (bound.seconds, bound.limited_by) == (pytest.approx(seconds), limited_by)


def test_a_decode_step_reads_weights_once_and_every_page() -> None:
    """17 tokens are two pages; of the embedding nothing counts, of the head all."""
    expected = (2 * (2 * LAYER + HEAD) + 3 * 2 * COSTS.page_bytes) / 1e9
    bound = decode_bound(COSTS, rows=3, context_tokens=17)
    check(bound, expected, "memory")


def test_a_tied_head_is_the_embedding() -> None:
    tied = dataclasses.replace(MODEL, tie_word_embeddings=True)
    costs = dataclasses.replace(COSTS, model=tied, parameter_bytes=2 * (2 * LAYER + HEAD))
    assert decode_bound(costs, rows=3, context_tokens=17) == decode_bound(
        COSTS, rows=3, context_tokens=17
    )


def test_a_prompt_is_bounded_by_flops() -> None:
    """Query i sees i + 1 tokens; only the last token needs logits."""
    tokens = 512
    chip = dataclasses.replace(COSTS.chip, bytes_per_s=1e15)
    costs = dataclasses.replace(COSTS, chip=chip)
    attention = 2 * 4 * 4 * 16 * tokens * (tokens + 1) // 2
    flops = 2 * (2 * LAYER * tokens + HEAD) + attention
    bound = prefill_bound(costs, prompt_tokens=tokens, chunk=tokens)
    check(bound, flops / 1e12, "flops")


def test_every_chunk_reads_the_weights_again() -> None:
    """And the pages so far; the head is read by the last one alone."""
    expected = (3 * 2 * 2 * LAYER + 2 * HEAD + (1 + 2 + 3) * COSTS.page_bytes) / 1e9
    bound = prefill_bound(COSTS, prompt_tokens=40, chunk=16)
    check(bound, expected, "memory")


def test_chunks_do_not_change_the_flops() -> None:
    chip = dataclasses.replace(COSTS.chip, bytes_per_s=1e18)
    costs = dataclasses.replace(COSTS, chip=chip)
    whole = prefill_bound(costs, prompt_tokens=1000, chunk=1000)
    parts = prefill_bound(costs, prompt_tokens=1000, chunk=64)
    assert whole is not None
    assert parts is not None
    assert parts.seconds == pytest.approx(whole.seconds)


@pytest.mark.parametrize("num_devices", [2, 4, 8, 16])
@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.platform != "cpu"])
def test_devices_share_and_exchange(chip: Chip, num_devices: int) -> None:
    """Two all-reduces a layer: a device sends 2 (n - 1) / n of the sum, or 1 if a switch sums.

    Fails where a chip's links are held to more than its network needs, or to less.
    """
    slow = dataclasses.replace(chip, link_bytes_per_s=1e6)
    costs = dataclasses.replace(COSTS, chip=slow, num_devices=num_devices)
    sums = chip.name in ("h100", "h200", "b200")
    share = 1 if sums else 2 * (num_devices - 1) / num_devices
    bound = decode_bound(costs, rows=8, context_tokens=100)
    check(bound, share * (2 * 2 * 8 * 64 * 2) / 1e6, "links")


def test_an_unknown_chip_has_no_bounds() -> None:
    costs = dataclasses.replace(COSTS, chip=CHIPS["cpu"])
    assert decode_bound(costs, rows=1, context_tokens=1) is None
    assert prefill_bound(costs, prompt_tokens=1, chunk=1) is None


def test_more_is_never_faster() -> None:
    """In rows, context and prompt; a bound that is not monotonic has a wrong term."""

    def seconds(rows: int, context_tokens: int) -> float:
        bound = decode_bound(COSTS, rows=rows, context_tokens=context_tokens)
        assert bound is not None
        return bound.seconds

    for rows, context_tokens in [(1, 1), (7, 15), (7, 16), (64, 4000)]:
        assert seconds(rows, context_tokens) <= seconds(rows + 1, context_tokens)
        assert seconds(rows, context_tokens) <= seconds(rows, context_tokens + 1)

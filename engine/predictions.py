"""Predictions: how long steps and prompts will take, by what the last steps took. No JAX.

What was measured at start, or planned, times how far the last steps were off. So a busy machine, a
start that was measured on one, or attention that grows with the context corrects itself, for all
that asks: how large chunks are, who cannot be served in time, what is computed again. Copies from
host memory are no steps; of them nothing is learned, and they are predicted as they were measured.
"""

from ..configs.engine_config import EngineConfig
from .schedule import Schedule, TransferKind
from .step_costs import StepCosts, chunk_kv_tokens
from .step_shapes import StepKey, StepShapes

DRIFT_WEIGHT = 0.2
"""Of the last step in the running mean of measured over predicted."""

MIN_DRIFT, MAX_DRIFT = 0.25, 4.0


class Predictions:
    """StepCosts of one engine, corrected by its steps."""

    def __init__(self, config: EngineConfig, costs: StepCosts) -> None:
        """Trusts the costs until steps were seen."""
        self._shapes = StepShapes.from_config(config)
        self._costs = costs
        self._drift = 1.0

    def step_s(self, key: StepKey, *, decode_kv_tokens: int = 0, chunk_kv_tokens: int = 0) -> float:
        """Of one step; as StepCosts.step_s."""
        return self._drift * self._costs.step_s(
            key, decode_kv_tokens=decode_kv_tokens, chunk_kv_tokens=chunk_kv_tokens
        )

    def prefill_s(self, start: int, end: int) -> float:
        """Of computing tokens [start, end) of one prompt; as StepCosts.prefill_s."""
        return self._drift * self._costs.prefill_s(start, end)

    def import_pages_s(self, num_pages: int) -> float:
        """Of bringing pages back from host memory."""
        return self._costs.import_pages_s(num_pages)

    def observe(self, schedule: Schedule, measured_s: float) -> None:
        """Learns from a step how far predictions are off; not from one that waited for imports."""
        if any(transfer.kind is TransferKind.IMPORT for transfer in schedule.transfers):
            return
        num_chunk_tokens = sum(chunk.length for chunk in schedule.chunks)
        predicted_s = self._costs.step_s(
            self._shapes.key_for(len(schedule.decodes), num_chunk_tokens),
            decode_kv_tokens=schedule.decode_kv_tokens,
            chunk_kv_tokens=sum(chunk_kv_tokens(c.start, c.length) for c in schedule.chunks),
        )
        ratio = min(max(measured_s / predicted_s, MIN_DRIFT), MAX_DRIFT)
        self._drift += DRIFT_WEIGHT * (ratio - self._drift)

"""ChunkBudget: how many prompt tokens the next step takes. No JAX.

Decode rows run in every step, so a step that takes long delays every stream by that much. Where
there is a target for the time between tokens, the chunk is the largest whose step is predicted to
keep it. Predictions are what was measured at start, times how far the last steps were off: a busy
machine, or attention that grows with the context, corrects itself.
"""

from collections.abc import Sequence

from ..configs.engine_config import EngineConfig
from .schedule import RequestState, Schedule
from .step_costs import StepCosts, chunk_kv_tokens
from .step_shapes import StepShapes

DRIFT_WEIGHT = 0.2
"""Of the last step in the running mean of measured over predicted."""

MIN_DRIFT, MAX_DRIFT = 0.25, 4.0


class ChunkBudget:
    """Sizes chunks for one engine."""

    def __init__(self, config: EngineConfig, costs: StepCosts) -> None:
        """Trusts the predictions until steps were seen."""
        self._config = config
        self._shapes = StepShapes.from_config(config)
        self._costs = costs
        target_ms = config.scheduling.inter_token_target_ms
        self._target_s = None if target_ms is None else target_ms / 1000
        self._drift = 1.0

    def tokens(
        self, running: Sequence[RequestState], *, num_decodes: int, decode_kv_tokens: int
    ) -> int:
        """Prompt tokens that the next step may take.

        Args:
          running: Who runs; the first of them that prefills says how long the contexts are.
          num_decodes: Decode rows of the step.
          decode_kv_tokens: Their contexts, summed.
        """
        config = self._config
        most = min(config.prefill_chunk_tokens, config.token_budget - num_decodes)
        if self._target_s is None or not num_decodes:
            return most
        start = next((state.num_computed_tokens for state in running if state.is_prefilling), 0)
        for chunk in reversed(self._shapes.chunks):
            key = self._shapes.key_for(num_decodes, min(chunk, most))
            length = min(key.chunk, most)  # no fewer than the step takes in any case
            predicted_s = self._costs.step_s(
                key,
                decode_kv_tokens=decode_kv_tokens,
                chunk_kv_tokens=chunk_kv_tokens(start, length),
            )
            if predicted_s * self._drift <= self._target_s:
                return length
        # Prompts advance in any case.
        return min(self._shapes.key_for(num_decodes, 1).chunk, most)

    def observe(self, schedule: Schedule, measured_s: float) -> None:
        """Learns from a step how far predictions are off."""
        num_chunk_tokens = sum(chunk.length for chunk in schedule.chunks)
        predicted_s = self._costs.step_s(
            self._shapes.key_for(len(schedule.decodes), num_chunk_tokens),
            decode_kv_tokens=schedule.decode_kv_tokens,
            chunk_kv_tokens=sum(chunk_kv_tokens(c.start, c.length) for c in schedule.chunks),
        )
        ratio = min(max(measured_s / predicted_s, MIN_DRIFT), MAX_DRIFT)
        self._drift += DRIFT_WEIGHT * (ratio - self._drift)

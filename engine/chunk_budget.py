"""ChunkBudget: how many prompt tokens the next step takes. No JAX.

Decode rows run in every step, so a step that takes long delays every stream by that much. Where
there is a target for the time between tokens, the chunk is the largest whose step is predicted to
keep it. Under the policy "deadline" the targets of the decode rows count as well as that of the
engine.
"""

import math
from collections.abc import Sequence

from ..configs.engine_config import EngineConfig
from .predictions import Predictions
from .schedule import RequestState
from .step_costs import chunk_kv_tokens
from .step_shapes import StepShapes


class ChunkBudget:
    """Sizes chunks for one engine."""

    def __init__(self, config: EngineConfig, predictions: Predictions) -> None:
        """For these sizes and targets, by what steps are predicted to take."""
        self._config = config
        self._shapes = StepShapes.from_config(config)
        self._predictions = predictions
        target_ms = config.scheduling.inter_token_target_ms
        self._target_s = math.inf if target_ms is None else target_ms / 1000
        self._keeps_row_targets = config.scheduling.policy == "deadline"

    def tokens(
        self,
        running: Sequence[RequestState],
        decodes: Sequence[RequestState],
        *,
        decode_kv_tokens: int,
    ) -> int:
        """Prompt tokens that the next step may take.

        A row whose target not even the smallest chunk keeps slows no prompt down: its target does
        not count, as with first tokens that cannot come in time (engine.policy_deadline). That of
        the engine always does; below it prompts advance by the smallest chunk.

        Args:
          running: Who runs; the first of them that prefills says how long the contexts are.
          decodes: Decode rows of the step.
          decode_kv_tokens: Their contexts, summed.
        """
        config, num_decodes = self._config, len(decodes)
        most = min(config.prefill_chunk_tokens, config.token_budget - num_decodes)
        row_targets_s = self._row_targets_s(decodes)
        if not decodes or (self._target_s == math.inf and not row_targets_s):
            return most
        start = next((state.num_computed_tokens for state in running if state.is_prefilling), 0)

        def predicted_s(length: int) -> float:
            return self._predictions.step_s(
                self._shapes.key_for(num_decodes, length),
                decode_kv_tokens=decode_kv_tokens,
                chunk_kv_tokens=chunk_kv_tokens(start, length),
            )

        # No fewer than the step takes in any case.
        lengths = [
            min(self._shapes.key_for(num_decodes, min(chunk, most)).chunk, most)
            for chunk in self._shapes.chunks
        ]
        least_s = predicted_s(lengths[0])
        kept_s = min((each for each in row_targets_s if each >= least_s), default=math.inf)
        target_s = min(self._target_s, kept_s)
        return next(
            (length for length in reversed(lengths) if predicted_s(length) <= target_s), lengths[0]
        )

    def _row_targets_s(self, decodes: Sequence[RequestState]) -> list[float]:
        """Of those rows that have one, if they count."""
        if not self._keeps_row_targets:
            return []
        targets_s = (state.request.tpot_target_s for state in decodes)
        return [each for each in targets_s if each is not None]

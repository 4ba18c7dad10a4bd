"""SimulationResults: what became of each request, as columns of numbers. No JAX."""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .request import FinishReason
from .schedule import RequestState

_REASONS = tuple(FinishReason)

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The numbers of a group of requests.

    Attributes:
      num_ended: Requests that ended, for whatever reason.
      num_expired: Those of them whose time was over.
      num_output_tokens: All outputs.
      goodput: Those that ended by themselves and met their targets, or have none.
      queue_s, ttft_s, tpot_s, e2e_s: PERCENTILES, of those that got so far; the time to the first
        slot, to the first token, per further token, and to the end.
      longest_queue_s: The longest wait for a slot.
      num_preemptions: In all.
      hit_rate: Prompt tokens that were cached, of those of requests that got a slot.
    """

    num_ended: int
    num_expired: int
    num_output_tokens: int
    goodput: int
    queue_s: tuple[float, ...]
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    longest_queue_s: float
    num_preemptions: int
    hit_rate: float


class SimulationResults:
    """Some 50 bytes per request. `groups` are numbers of (tenant, class), in order of appearance.

    Attributes:
      num_refused: Requests that were refused when they first came.
      num_returned: Those of them that came back.
      num_let_in: Those of them that were let in at this first retry.
    """

    def __init__(self) -> None:
        """Nobody ended."""
        self.num_refused = self.num_returned = self.num_let_in = 0
        self._numbers: dict[tuple[str, str], int] = {}
        self._group, self._reason, self._is_good = array("H"), array("B"), array("B")
        self._arrival_s = array("d")
        self._queue_s, self._ttft_s = array("f"), array("f")
        self._tpot_s, self._e2e_s = array("f"), array("f")
        self._outputs, self._prompts, self._cached = array("I"), array("I"), array("I")
        self._preemptions = array("H")

    def __len__(self) -> int:
        """Requests that ended."""
        return len(self._group)

    @property
    def groups(self) -> list[tuple[str, str]]:
        """Tenants and classes."""
        return sorted(self._numbers)

    def add(self, state: RequestState, reason: FinishReason, now_s: float) -> None:
        """A request has ended."""
        request = state.request
        key = (request.tenant, request.request_class)
        self._group.append(self._numbers.setdefault(key, len(self._numbers)))
        self._reason.append(_REASONS.index(reason))
        arrival_s, first_s, nan = request.arrival_s, state.first_token_s, math.nan
        num_outputs = len(state.output_token_ids)
        ttft_s = nan if first_s is None else first_s - arrival_s
        tpot_s = (
            nan if first_s is None or num_outputs < 2 else (now_s - first_s) / (num_outputs - 1)
        )
        self._arrival_s.append(arrival_s)
        self._queue_s.append((state.admitted_s or now_s) - arrival_s)
        self._ttft_s.append(ttft_s)
        self._tpot_s.append(tpot_s)
        self._e2e_s.append(now_s - arrival_s)
        self._outputs.append(num_outputs)
        self._prompts.append(0 if state.admitted_s is None else len(request.prompt_token_ids))
        self._cached.append(state.num_cached_tokens)
        self._preemptions.append(state.num_preemptions)
        # In the positive form NaN would be late; whoever has no second token has no pace to keep.
        ttft_target_s = math.inf if request.ttft_target_s is None else request.ttft_target_s
        tpot_target_s = math.inf if request.tpot_target_s is None else request.tpot_target_s
        ended = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._is_good.append(ended and ttft_s <= ttft_target_s and not tpot_s > tpot_target_s)

    def group(
        self,
        is_in: Callable[[str, str], bool] = lambda tenant, request_class: True,
        *,
        from_s: float = 0.0,
        to_s: float = math.inf,
    ) -> Group:
        """The numbers of requests of some tenants and classes that arrived in [from_s, to_s)."""
        wanted = [number for key, number in self._numbers.items() if is_in(*key)]
        arrival_s = np.frombuffer(self._arrival_s)
        chosen = np.isin(np.frombuffer(self._group, np.uint16), wanted)
        chosen &= (from_s <= arrival_s) & (arrival_s < to_s)

        def column(values: "array[int] | array[float]") -> np.ndarray:
            return np.frombuffer(values, np.dtype(values.typecode))[chosen]

        reasons, prompts = column(self._reason), column(self._prompts)
        queue_s = column(self._queue_s)
        return Group(
            num_ended=int(chosen.sum()),
            num_expired=int((reasons == _REASONS.index(FinishReason.DEADLINE)).sum()),
            num_output_tokens=int(column(self._outputs).sum(dtype=np.int64)),
            goodput=int(column(self._is_good).sum()),
            queue_s=_percentiles(queue_s),
            ttft_s=_percentiles(column(self._ttft_s)),
            tpot_s=_percentiles(column(self._tpot_s)),
            e2e_s=_percentiles(column(self._e2e_s)),
            longest_queue_s=float(queue_s.max(initial=0.0)),
            num_preemptions=int(column(self._preemptions).sum(dtype=np.int64)),
            hit_rate=float(column(self._cached).sum(dtype=np.int64))
            / max(1, int(prompts.sum(dtype=np.int64))),
        )


def _percentiles(values: np.ndarray) -> tuple[float, ...]:
    """Of those that are numbers; NaN if there are none."""
    values = values[~np.isnan(values)]
    if not len(values):
        return (math.nan,) * len(PERCENTILES)
    return tuple(float(each) for each in np.percentile(values, PERCENTILES))

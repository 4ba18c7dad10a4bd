"""How busy an engine is, put together from what its parts count. No JAX."""

from collections import Counter
from dataclasses import dataclass, field

from .request import FinishReason, Load
from .scheduler import Scheduler


@dataclass
class Totals:
    """What an engine counts itself, of all choices; see Load."""

    steps: int = 0
    output_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)


def load_of(scheduler: Scheduler, totals: Totals, *, progress_s: float, failed: bool) -> Load:
    """The load of an engine; what only admission knows is 0."""
    memory = scheduler.memory
    return Load(
        num_queued=len(scheduler.waiting),
        num_running=len(scheduler.running) + len(scheduler.ending),
        num_usable_pages=memory.pool.num_usable,
        num_free_pages=memory.num_available,
        num_cached_pages=memory.cache.num_unheld,
        num_host_pages=memory.num_host_pages,
        steps_total=totals.steps,
        preemptions_total=scheduler.preemptions_total,
        prompt_tokens_total=scheduler.prompt_tokens_total,
        cached_tokens_total=scheduler.cached_tokens_total,
        output_tokens_total=totals.output_tokens,
        finished_total={reason: totals.finished[reason] for reason in FinishReason},
        evicted_pages_total={reason.value: count for reason, count in memory.cache.evicted.items()},
        evicted_age_s_total={
            reason.value: age_s for reason, age_s in memory.evicted_age_s.items() if age_s
        },
        exported_pages_total=memory.exported_pages,
        imported_pages_total=memory.imported_pages,
        progress_s=progress_s,
        failed=failed,
    )

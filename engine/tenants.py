"""Tenants: what each tenant has in the queue and in flight, against its bounds. No JAX."""

from collections import Counter
from dataclasses import dataclass, field

from ..configs.scheduling_config import SchedulingConfig
from .admission_bound import Bound

KEPT_SHARE_STEP = 0.02  # so that the last 50 promises or so count
MAX_REMEMBERED = 4096  # tenants that have nothing else
MIN_KEPT_SHARE = 0.01  # so that clients who begin to come back are noticed in time


@dataclass(eq=False, kw_only=True)
class Tenant:
    """What one tenant has.

    Attributes:
      name: The tenant.
      queued: Its requests that wait, against max_tenant_queued.
      tokens: Prompt and most output tokens of its live requests, against max_tenant_tokens.
      num_live: Its live requests.
      num_promises: Promises outstanding, each of which keeps places.
      promised: Those places, summed for each bound.
      kept_share: The part of its promises whose clients do come back, as it was lately.
    """

    name: str
    queued: Bound
    tokens: Bound
    num_live: int = 0
    num_promises: int = 0
    promised: Counter[Bound] = field(default_factory=Counter)
    kept_share: float = 1.0

    @property
    def is_idle(self) -> bool:
        """It has neither live requests nor promises."""
        return not self.num_live and not self.num_promises

    def note_promise(self, *, is_kept: bool) -> None:
        """A client of it came back as it was told, or did not: so will the others."""
        before = self.kept_share
        after = before + KEPT_SHARE_STEP * (is_kept - before)
        self.kept_share = max(after, MIN_KEPT_SHARE)
        for bound, size in self.promised.items():
            bound.expect(size * (self.kept_share - before))


class Tenants:
    """The tenants that have something. The rest are forgotten, so that their number is bounded.

    Of those that broke promises lately the share of kept ones is remembered, or they would begin
    anew each time that nothing of theirs is left.
    """

    def __init__(self, config: SchedulingConfig) -> None:
        """Starts with none.

        Args:
          config: For max_tenant_queued and max_tenant_tokens.
        """
        self._config = config
        self._by_name: dict[str, Tenant] = {}
        self._kept_shares: dict[str, float] = {}

    def get(
        self, name: str, *, requests_per_s: float, tokens_per_request: int, now_s: float
    ) -> Tenant:
        """The record of a tenant.

        Args:
          name: The tenant.
          requests_per_s: The pace of all tenants together; a new one is taken to get a fair share.
          tokens_per_request: What a request of this tenant adds to `tokens`, as far as is known.
          now_s: The time.
        """
        if name not in self._by_name:
            requests_per_s /= len(self._by_name) + 1
            most_tokens = self._config.max_tenant_tokens
            half = None if most_tokens is None else most_tokens // 2
            self._by_name[name] = Tenant(
                name=name,
                kept_share=self._kept_shares.pop(name, 1.0),
                queued=Bound(
                    room=self._config.max_tenant_queued,
                    start_per_s=requests_per_s,
                    now_s=now_s,
                ),
                # Its pace is measured from half the bound on: below, little leaves because little
                # is there.
                tokens=Bound(
                    floor=0 if most_tokens is None else most_tokens - most_tokens // 2,
                    room=half,
                    start_per_s=requests_per_s * tokens_per_request,
                    now_s=now_s,
                ),
            )
        return self._by_name[name]

    def forget_if_idle(self, name: str) -> None:
        """Drops the record of a tenant that has nothing."""
        if name in self._by_name and self._by_name[name].is_idle:
            kept_share = self._by_name.pop(name).kept_share
            if kept_share < 1:
                self._kept_shares[name] = kept_share
            if len(self._kept_shares) > MAX_REMEMBERED:
                del self._kept_shares[next(iter(self._kept_shares))]  # the oldest

    def all(self) -> list[Tenant]:
        """The tenants that have something."""
        return list(self._by_name.values())

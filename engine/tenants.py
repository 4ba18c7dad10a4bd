"""Tenants: what each tenant has in the queue and in flight, against its bounds. No JAX."""

from dataclasses import dataclass

from ..configs.scheduling_config import SchedulingConfig
from .admission_bound import Bound

KEPT_SHARE_STEP = 0.02  # so that the last 50 promises or so count
MIN_KEPT_SHARE = 0.01  # so that clients who begin to come back are noticed in time


@dataclass(eq=False, kw_only=True)
class Tenant:
    """What one tenant has.

    Attributes:
      name: The tenant.
      queued: Its requests that wait, against max_tenant_queued.
      tokens: Prompt and most output tokens of its live requests, against max_tenant_tokens.
      num_live: Its live requests.
      num_promises: Places that are kept for it.
      kept_share: The part of its promises whose clients do come back, as it was lately.
    """

    name: str
    queued: Bound
    tokens: Bound
    num_live: int = 0
    num_promises: int = 0
    kept_share: float = 1.0

    @property
    def is_idle(self) -> bool:
        """It has neither live requests nor promises."""
        return not self.num_live and not self.num_promises

    def note_promise(self, *, is_kept: bool) -> None:
        """A client of it came back as it was told, or did not."""
        self.kept_share += KEPT_SHARE_STEP * (is_kept - self.kept_share)
        self.kept_share = max(self.kept_share, MIN_KEPT_SHARE)


class Tenants:
    """The tenants that have something. The rest are forgotten, so that their number is bounded."""

    def __init__(self, config: SchedulingConfig) -> None:
        """Starts with none.

        Args:
          config: For max_tenant_queued and max_tenant_tokens.
        """
        self._config = config
        self._by_name: dict[str, Tenant] = {}

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
            del self._by_name[name]

    def all(self) -> list[Tenant]:
        """The tenants that have something."""
        return list(self._by_name.values())

"""SchedulingConfig: who is let in, who goes first, and what is kept for the next one."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["fcfs", "priority", "fair", "deadline"]

MAX_TENANT_WEIGHT = 1000.0
MIN_PRIORITY, MAX_PRIORITY = -100, 100

# Name, lowest and highest value, and whether None, which means "no such bound", is one too.
_WHOLE_NUMBERS: tuple[tuple[str, int, int, bool], ...] = (
    ("max_num_queued", 0, 2**20, False),
    ("max_queued_tokens", 1, 2**40, True),
    ("max_tenant_running", 1, 4096, True),
    ("max_tenant_queued", 0, 2**20, True),
    ("max_tenant_tokens", 2, 2**40, True),
)
_NUMBERS: tuple[tuple[str, float, float, bool], ...] = (
    ("max_predicted_wait_s", 1e-3, 86_400.0, True),
    ("queue_ttl_s", 1e-3, 86_400.0, True),
    ("priority_ageing_s", 1e-3, 86_400.0, False),
    ("default_ttft_target_s", 1e-3, 86_400.0, False),
    ("inter_token_target_ms", 1e-3, 60_000.0, True),
)


@dataclass(frozen=True, kw_only=True)
class SchedulingConfig:
    """What may wait, in which order it is served, and how prompts share steps with running rows.

    Attributes:
      policy: In which order requests are admitted. "fcfs": as they came. "priority": the higher
        first, with ageing. "fair": tenants get equal (or weighted) shares of the tokens.
        "deadline": whose first token is due first, and prompt chunks shrink beside requests with
        a target for further tokens.
      prefix_cache: Whether pages of KV are kept for later prompts that begin alike.
      inter_token_target_ms: Prompt chunks shrink until a step is predicted to take no longer than
        this while requests decode beside them. None: chunks are as large as they may be.
      max_num_queued: Requests that may wait for a slot, each choice of one counted; one more is
        refused.
      max_queued_tokens: Prompt tokens that may wait. Those in the prefix cache do not count once
        the engine has looked; a prompt that comes counts in full. A longer one may wait alone.
      max_predicted_wait_s: A request that would wait longer for a slot is refused.
      queue_ttl_s: A request that has waited this long for its first slot ends by deadline. A
        request may ask for less.
      max_tenant_running: Requests of one tenant that may hold a slot at once.
      max_tenant_queued: Requests of one tenant that may wait.
      max_tenant_tokens: Prompt and most output tokens of one tenant's live requests together.
      priority_ageing_s: Seconds of waiting that weigh as much as one step of priority; what makes
        the wait of the lowest priority bounded. Of the policy "priority".
      tenant_weights: (tenant, weight) where the weight is not 1. Of the policy "fair".
      default_ttft_target_s: Stands in for the target of requests that bring none, so that they
        are served in bounded time. Of the policy "deadline".
    """

    policy: PolicyName = "fcfs"
    prefix_cache: bool = True
    inter_token_target_ms: float | None = None
    max_num_queued: int = 1024
    max_queued_tokens: int | None = None
    max_predicted_wait_s: float | None = None
    queue_ttl_s: float | None = None
    max_tenant_running: int | None = None
    max_tenant_queued: int | None = None
    max_tenant_tokens: int | None = None
    priority_ageing_s: float = 10.0
    tenant_weights: tuple[tuple[str, float], ...] = ()
    default_ttft_target_s: float = 10.0

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and the bound."""
        if self.policy not in get_args(PolicyName):
            raise ValueError(f"policy is {self.policy!r}; it must be one of {get_args(PolicyName)}")
        if not isinstance(self.prefix_cache, bool):
            raise ValueError(f"prefix_cache is {self.prefix_cache!r}; it must be True or False")
        for name, low, high, is_optional in _WHOLE_NUMBERS:
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not (is_optional and value is None) and not (is_whole and low <= value <= high):
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number in [{low}, {high}]"
                )
        for name, low_s, high_s, is_optional in _NUMBERS:
            value = getattr(self, name)
            if not (is_optional and value is None) and not _is_number(value, low_s, high_s):
                raise ValueError(f"{name} is {value!r}; it must be in [{low_s:g}, {high_s:g}]")
        names = [name for name, _ in self.tenant_weights]
        if len(set(names)) < len(names):
            raise ValueError(f"tenant_weights is {self.tenant_weights}; no tenant may come twice")
        for name, weight in self.tenant_weights:
            if not _is_number(weight, 1 / MAX_TENANT_WEIGHT, MAX_TENANT_WEIGHT):
                raise ValueError(
                    f"tenant_weights has {weight!r} for {name!r}; a weight must be in "
                    f"[{1 / MAX_TENANT_WEIGHT:g}, {MAX_TENANT_WEIGHT:g}]"
                )


def _is_number(value: object, low: float, high: float) -> bool:
    """In the positive form, so that NaN does not pass."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
    )

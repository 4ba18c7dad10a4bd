"""The flags of `octavo serve` that say who is let in, who goes first and what is kept.

Names and defaults are those of SchedulingConfig, which also checks the values.
"""

from typing import get_args

from absl import flags

from ..configs.scheduling_config import PolicyName, SchedulingConfig
from .command_line import UsageError, check_utf8

_WHOLE_NUMBERS = {
    "max_num_queued": "Requests that may wait for a slot, each choice of one counted; one more is "
    "refused.",
    "max_queued_tokens": (
        "Prompt tokens that may wait; those found in the prefix cache do not count from then on, "
        "and a longer prompt may wait alone. Default: no bound."
    ),
    "max_tenant_running": "Requests of one tenant that may run at once. Default: no bound.",
    "max_tenant_queued": "Requests of one tenant that may wait for a slot. Default: no bound.",
    "max_tenant_tokens": (
        "Prompt and most output tokens of one tenant's requests, running and waiting. Default: no "
        "bound."
    ),
}
_NUMBERS = {
    "inter_token_target_ms": (
        "Milliseconds between two tokens of running requests: prompt chunks beside them shrink "
        "until a step is predicted to take no longer. Default: chunks are as large as they may be."
    ),
    "max_predicted_wait_s": (
        "A request that would wait more seconds than this for a slot is refused. Default: no bound."
    ),
    "queue_ttl_s": (
        "Seconds that a request may wait for its first slot before it ends by deadline; it may ask "
        "for less. Default: no bound."
    ),
    "priority_ageing_s": (
        "Seconds of waiting that weigh as much as one step of priority, under --policy=priority."
    ),
    "default_ttft_target_s": (
        "Seconds after which the first token of a request without a target is due, under "
        "--policy=deadline."
    ),
}


def define_scheduling_flags(values: flags.FlagValues) -> None:
    """Defines one for each field of SchedulingConfig."""
    defaults = SchedulingConfig()
    flags.DEFINE_enum(
        "policy",
        defaults.policy,
        list(get_args(PolicyName)),
        "Who gets a slot first. fcfs: who came first. priority: the higher, with ageing. fair: "
        "tenants share the tokens. deadline: whose first token is due first, and targets for "
        "further tokens are kept too.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "prefix_cache",
        defaults.prefix_cache,
        "Keep the KV pages of prompts for later ones that begin alike.",
        flag_values=values,
    )
    for name, meaning in _WHOLE_NUMBERS.items():
        flags.DEFINE_integer(name, getattr(defaults, name), meaning, flag_values=values)
    for name, meaning in _NUMBERS.items():
        flags.DEFINE_float(name, getattr(defaults, name), meaning, flag_values=values)
    flags.DEFINE_list(
        "tenant_weights",
        [],
        "Shares of tenants under --policy=fair, as NAME=WEIGHT separated by commas; 1 for those "
        "that are not named.",
        flag_values=values,
    )


def scheduling_config(values: flags.FlagValues) -> SchedulingConfig:
    """What the flags say; raises ValueError or UsageError naming the flag, value and bound."""
    numbers = {name: getattr(values, name) for name in (*_WHOLE_NUMBERS, *_NUMBERS)}
    return SchedulingConfig(
        policy=values.policy,
        prefix_cache=values.prefix_cache,
        tenant_weights=tuple(map(_tenant_weight, values.tenant_weights)),
        **numbers,
    )


def _tenant_weight(word: str) -> tuple[str, float]:
    check_utf8("--tenant_weights", word)
    name, separator, weight = word.rpartition("=")  # a name may have a "=" in it
    try:
        if not separator:
            raise ValueError
        return name, float(weight)
    except ValueError as error:
        raise UsageError(f"--tenant_weights has {word!r}; it must be NAME=WEIGHT") from error

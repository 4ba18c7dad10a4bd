"""The flags that say whose a request is, how urgent it is, and what may stand in for computing it.

One that is not given is not sent, so the server's documented default holds.
"""

from absl import flags

from . import octavo_pb2 as pb
from .command_line import UsageError, check_utf8

_TARGETS = {
    "ttft_target_ms": "Milliseconds after which the first token is due. Default: no target.",
    "tpot_target_ms": (
        "Milliseconds that each further token may take; kept where it can be under "
        "--policy=deadline. Default: no target."
    ),
    "queue_ttl_ms": (
        "Milliseconds that the request may wait for a slot before it ends by deadline. Default: "
        "what the server allows."
    ),
}


def define_request_flags(values: flags.FlagValues) -> None:
    """Defines them; what of them counts depends on the server's --policy."""
    flags.DEFINE_string("tenant", "", "Whose the request is.", flag_values=values)
    flags.DEFINE_integer(
        "priority",
        None,
        "The higher goes first, from -100 to 100. Default: 0.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "request_class", "", "What kind of request it is: a label for reports.", flag_values=values
    )
    for name, meaning in _TARGETS.items():
        flags.DEFINE_float(name, None, meaning, flag_values=values)
    flags.DEFINE_string(
        "cache_salt",
        "",
        "Share cached KV pages only with requests of the same salt.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "bypass_prefix_cache",
        False,
        "Compute the whole prompt, whatever is cached.",
        flag_values=values,
    )


def set_request_flags(values: flags.FlagValues, request: pb.GenerateRequest) -> None:
    """Puts what the flags say into a request.

    Raises:
      UsageError: A value does not fit the wire. The server knows the real bounds.
    """
    for name in ("tenant", "request_class", "cache_salt"):
        check_utf8(f"--{name}", getattr(values, name))
    request.tenant = values.tenant
    scheduling = request.scheduling
    scheduling.request_class = values.request_class
    for name in ("priority", *_TARGETS):
        value = getattr(values, name)
        if value is not None:
            try:
                setattr(scheduling, name, value)
            except ValueError as error:
                raise UsageError(f"--{name} is {value}; it must be in [-100, 100]") from error
    request.kv.cache_salt = values.cache_salt
    if values.bypass_prefix_cache:
        request.kv.bypass_prefix_cache = True

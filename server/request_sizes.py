"""How long the lists of a request may be, looked at before any of their elements is.

A message of sixteen MiB holds millions of ids. What admission says of each comes afterwards.
"""

from ..engine.sampling_checks import MAX_LOGIT_BIAS
from . import octavo_pb2 as pb
from .status import invalid


def check_sizes(sampling: pb.Sampling, vocab_size: int) -> None:
    """Raises Refusal for the first list that is too long.

    Args:
      sampling: As it was sent.
      vocab_size: A list of different ids is no longer than this.
    """
    for name, length, most in (
        ("stop_token_ids", len(sampling.stop_token_ids), vocab_size),
        ("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS),
        ("allowed_token_ids", len(sampling.allowed_token_ids.ids), vocab_size),
        ("banned_token_ids", len(sampling.banned_token_ids), vocab_size),
    ):
        if length > most:
            raise invalid(
                f"sampling.{name}", f"{name} has {length} ids; it must have at most {most}"
            )

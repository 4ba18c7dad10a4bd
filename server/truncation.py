"""Cutting a prompt that is too long, for requests that ask for it."""

from collections.abc import Sequence

from . import octavo_pb2 as pb
from .status import invalid

AS_MANY_AS_FIT = -1

_SIDES = {
    pb.TRUNCATION_SIDE_UNSPECIFIED: pb.TRUNCATION_SIDE_LEFT,
    pb.TRUNCATION_SIDE_LEFT: pb.TRUNCATION_SIDE_LEFT,
    pb.TRUNCATION_SIDE_RIGHT: pb.TRUNCATION_SIDE_RIGHT,
}


def truncated[T](
    prompt: Sequence[T], request: pb.GenerateRequest, max_model_len: int
) -> Sequence[T]:
    """What is left of a prompt: all of it unless `truncation` is there and it is longer.

    Raises:
      Refusal: max_prompt_tokens or side cannot be.
    """
    if not request.HasField("truncation"):
        return prompt
    truncation = request.truncation
    side = _SIDES.get(truncation.side)
    if side is None:
        raise invalid(
            "truncation.side",
            f"side is {truncation.side}; it must be TRUNCATION_SIDE_LEFT or TRUNCATION_SIDE_RIGHT",
        )
    num_kept = _num_kept(request, max_model_len)
    if len(prompt) <= num_kept:
        return prompt
    return prompt[-num_kept:] if side == pb.TRUNCATION_SIDE_LEFT else prompt[:num_kept]


def _num_kept(request: pb.GenerateRequest, max_model_len: int) -> int:
    truncation, sampling = request.truncation, request.sampling
    most = max_model_len - 1  # one token of output has to fit
    if truncation.HasField("max_prompt_tokens"):
        num_kept = truncation.max_prompt_tokens
        if num_kept != AS_MANY_AS_FIT:
            if not 1 <= num_kept <= most:
                raise invalid(
                    "truncation.max_prompt_tokens",
                    f"max_prompt_tokens is {num_kept}; it must be {AS_MANY_AS_FIT} or in "
                    f"[1, {most}]",
                )
            return num_kept
    # If the tokens cannot be so many, admission says so: by name, of the prompt that is left.
    num_output = sampling.max_tokens if sampling.HasField("max_tokens") else sampling.min_tokens
    return max(1, min(max_model_len - num_output, most))

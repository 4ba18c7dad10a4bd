"""Log-probabilities: of given tokens, and of the most likely ones.

They are the model's, before any rule, and bounded from below, so that what is reported is finite.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .sampling_params import LEAST_LOGPROB
from .vocabulary_blocks import highest_tokens, in_blocks


def chosen_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int32[Array, " rows"]
) -> Float[Array, " rows"]:
    """Log-probability of each row's token, at least LEAST_LOGPROB.

    NaN where the logits mean nothing: some are NaN or infinity, or all -inf. What the sum of their
    exponentials is tells that.
    """
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    whole = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(jnp.isfinite(whole), jnp.maximum(chosen - whole, LEAST_LOGPROB), jnp.nan)


def top_logprobs(
    logits: Float[Array, "rows vocab"], count: int
) -> tuple[Int32[Array, "rows count"], Float[Array, "rows count"]]:
    """The `count` most likely ids, the lowest id on ties, and theirs.

    A smaller vocabulary is filled up with id 0 and the least log-probability. Of no meaning where
    chosen_logprobs are NaN.
    """
    blocks = in_blocks(logits)
    value, token = highest_tokens(blocks, blocks.max(-1), count)
    logprob = jnp.maximum(value - jax.nn.logsumexp(logits, axis=-1)[:, None], LEAST_LOGPROB)
    return jnp.where(token < logits.shape[1], token, 0), logprob

"""The highest tokens found through blocks, against a sort of everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.vocabulary_blocks import highest_tokens, in_blocks

_VALUES = np.asarray([-np.inf, -1, -0.0, 0.0, 0.0, 1], np.float32)


@jax.jit(static_argnums=1)
def _highest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    blocks = in_blocks(logits)
    return highest_tokens(blocks, blocks.max(-1), count)


@pytest.mark.parametrize("count", [20, 64])
def test_the_highest_tokens_come_in_order_and_the_lowest_of_equals(count: int):
    """Fails if ties go to whichever block is higher, or if -0 is less than 0: both are one logit,
    and one greedy choice. Up to 40 times the blocks that are looked at."""
    rng = np.random.default_rng(count)
    logits = np.full((48, 64 * 64 * 40), -1, np.float32)
    for row, share in zip(logits, np.geomspace(1e-5, 1, len(logits)), strict=True):
        is_drawn = rng.random(row.size) < share
        row[is_drawn] = rng.choice(_VALUES, is_drawn.sum())
    values, tokens = map(np.asarray, _highest(jnp.asarray(logits), count))
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    assert (tokens == expected).all()
    assert (values == np.take_along_axis(logits, expected, axis=1)).all()

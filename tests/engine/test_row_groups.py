"""Work for some rows comes to each of them once, in groups whose padding is past the rows.

What would break these: a row that is left out or worked on twice, or two equal numbers in a group,
of which a scatter was told that there are none.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.row_groups import for_groups

GROUP = 4


@jax.jit
def groups(is_chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many groups there were, and the row numbers of each."""
    most = -(-is_chosen.shape[0] // GROUP)

    def note(rows: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        count, seen = carry
        return count + 1, seen.at[count].set(rows)

    return for_groups(is_chosen, GROUP, note, (jnp.int32(0), jnp.zeros((most, GROUP), jnp.int32)))


@pytest.mark.parametrize("num_rows", [0, 1, 4, 6, 17])
def test_every_chosen_row_comes_once_and_no_two_numbers_are_equal(num_rows: int):
    rng = np.random.default_rng(num_rows)
    shares = [np.zeros(num_rows, bool), np.ones(num_rows, bool)]
    for is_chosen in [*shares, *(rng.random((20, num_rows)) < 0.4)]:
        count, seen = map(np.asarray, groups(jnp.asarray(is_chosen)))
        assert count == -(-is_chosen.sum() // GROUP)
        for group in seen[:count]:
            assert len({*group.tolist()}) == GROUP
        numbers = seen[:count].ravel()
        assert numbers[numbers < num_rows].tolist() == np.flatnonzero(is_chosen).tolist()
        assert (numbers >= 0).all()

"""Work for some rows of a batch, a few at a time, so that its cost follows how many they are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped


def for_groups[T](
    is_chosen: Bool[Array, " rows"],
    group: int,
    run: Callable[[Int32[Array, " group"], T], T],
    carry: T,
) -> T:
    """Runs `run(row numbers, carry)` over the chosen rows in order, `group` at a time.

    Numbers past the rows are padding: a gather reads the last row for them, and a scatter drops
    them. All numbers of a group are different, which a scatter may be told: else a GPU adds up what
    it writes one number at a time.
    """
    num_rows = is_chosen.shape[0]
    if num_rows == 0:
        return carry
    row = jnp.arange(num_rows, dtype=jnp.int32)
    place = (is_chosen & (row < row[:, None])).sum(-1)  # how many chosen rows come before
    chosen = num_rows + jnp.arange(num_rows + group, dtype=jnp.int32)
    place = jnp.where(is_chosen, place, chosen.shape[0] + row)
    chosen = chosen.at[place].set(row, mode="drop", unique_indices=True)

    def run_group(index: Int32[Array, ""], carry: T) -> T:
        return run(lax.dynamic_slice_in_dim(chosen, index * group, group), carry)

    return lax.fori_loop(0, (is_chosen.sum() + group - 1) // group, run_group, carry)


def take_rows[T](tree: T, rows: Int32[Array, " some"]) -> T:
    """Some rows of every array in a pytree; a number past them reads the last."""

    def take(array: jax.Array) -> jax.Array:
        return array[rows]

    return jax.tree.map(take, tree)


def read_wide_rows(
    table: Shaped[Array, "rows columns"], rows: Int32[Array, " some"]
) -> Shaped[Array, "some columns"]:
    """A few rows of a wide table, one slice each; a number past them reads the last.

    For a gather XLA's TPU compiler takes the whole table into VMEM, where there is no room for it.
    """
    some = [lax.dynamic_index_in_dim(table, rows[i], keepdims=False) for i in range(rows.shape[0])]
    return jnp.stack(some)

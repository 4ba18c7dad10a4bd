"""Pages of KV on their way to host memory and back: two pure functions over whatever KV there is.

An entry of the KV is a pytree whose leaves all have the page as leading axis; nothing else is
known of it here. On the host a page is one flat array of words: all leaves of all layers in the
order of the tree, bit for bit.

Pages are taken and put back one by one: XLA for TPUs makes a copy of the whole pool, in a layout of
its own, for one gather or scatter of several pages.
"""

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped, UInt

# Pages that one run moves. One is mostly overhead, many are mostly padding where few are moved.
PAGES_PER_TRANSFER = 8


class TransferKey(Enum):
    """Names the executables that move pages, as a StepKey names a step."""

    EXPORT = "export"
    IMPORT = "import"


def export_pages(kv: Any, pages: Int32[Array, " pages"]) -> tuple[UInt[Array, " words"], ...]:
    """Reads pages.

    Args:
      kv: The pool; leaves [num_pages, ...].
      pages: Which; padding names page 0.

    Returns:
      An array for each page, so that each can be dropped alone.
    """
    word = page_spec(kv).dtype
    leaves = jax.tree.leaves(kv)
    return tuple(
        jnp.concatenate(
            [
                _to_words(lax.dynamic_index_in_dim(leaf, page, keepdims=False), word)
                for leaf in leaves
            ]
        )
        for page in pages
    )


def import_pages(
    kv: Any,
    pages: Int32[Array, " pages"],
    contents: Sequence[UInt[Array, " words"]],
) -> Any:
    """Writes what export_pages read into other pages. Donates kv.

    Args:
      kv: The pool; leaves [num_pages, ...].
      pages: Where to. Padding names one of the others again, with the same content.
      contents: One array for each, in device memory.

    Returns:
      The pool with those pages written.
    """
    stacked = jnp.stack(contents)

    def write(index: jax.Array, kv: Any) -> Any:
        leaves, tree = jax.tree.flatten(kv)
        written: list[jax.Array] = []
        start = 0
        for leaf in leaves:
            stop = start + _words_per_page(leaf, stacked.dtype)
            new = _from_words(stacked[index, start:stop], leaf)
            written.append(lax.dynamic_update_index_in_dim(leaf, new, pages[index], 0))
            start = stop
        return jax.tree.unflatten(tree, written)

    return lax.fori_loop(0, len(contents), write, kv)


def page_spec(kv: Any) -> jax.ShapeDtypeStruct:
    """Shape and type of one page on the host: words as wide as the narrowest leaf's elements.

    Integers, because a copy of floats may quiet a NaN. A leaf of wider elements takes several
    words for each. Only shapes and types of `kv` are looked at.
    """
    leaves = jax.tree.leaves(kv)
    width = min(leaf.dtype.itemsize for leaf in leaves)
    word = np.dtype(f"uint{8 * width}")
    return jax.ShapeDtypeStruct((sum(_words_per_page(leaf, word) for leaf in leaves),), word)


def _words_per_page(leaf: Any, word: np.dtype) -> int:
    return math.prod(leaf.shape[1:]) * leaf.dtype.itemsize // word.itemsize


def _to_words(part: Shaped[Array, "..."], word: np.dtype) -> UInt[Array, " words"]:
    return lax.bitcast_convert_type(part, word).reshape(-1)


def _from_words(words: UInt[Array, " words"], leaf: jax.Array) -> Shaped[Array, "..."]:
    """The inverse of _to_words, for a page of `leaf`."""
    per_element = leaf.dtype.itemsize // words.dtype.itemsize
    # Elements as wide as a word have no axis of their words.
    shape = leaf.shape[1:] if per_element == 1 else (*leaf.shape[1:], per_element)
    return lax.bitcast_convert_type(words.reshape(shape), leaf.dtype)

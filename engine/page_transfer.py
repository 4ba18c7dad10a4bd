"""Pages of KV on their way to host memory and back: two pure functions over whatever KV there is.

An entry of the KV is a pytree whose leaves all have the page as leading axis; nothing else is
known of it here. On the host a page is one flat array of words: all leaves of all layers in the
order of the tree, bit for bit.
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
    words = jnp.concatenate([_to_words(leaf[pages], word) for leaf in leaves], axis=1)
    return tuple(words)


def import_pages(
    kv: Any,
    pages: Int32[Array, " pages"],
    contents: Sequence[UInt[Array, " words"]],
) -> Any:
    """Writes what export_pages read into other pages. Donates kv.

    Args:
      kv: The pool; leaves [num_pages, ...].
      pages: Where to; all different. Padding names page num_pages + i, which is dropped.
      contents: One array for each, in device memory.

    Returns:
      The pool with those pages written.
    """
    words = jnp.stack(contents)
    leaves, tree = jax.tree.flatten(kv)
    written: list[jax.Array] = []
    start = 0
    for leaf in leaves:
        stop = start + _words_per_page(leaf, words.dtype)
        new = _from_words(words[:, start:stop], leaf)
        written.append(leaf.at[pages].set(new, mode="drop", unique_indices=True))
        start = stop
    return jax.tree.unflatten(tree, written)


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


def _to_words(part: Shaped[Array, "pages ..."], word: np.dtype) -> UInt[Array, "pages words"]:
    return lax.bitcast_convert_type(part, word).reshape(part.shape[0], -1)


def _from_words(words: UInt[Array, "pages words"], leaf: jax.Array) -> Shaped[Array, "pages ..."]:
    """The inverse of _to_words, for pages of `leaf`."""
    per_element = leaf.dtype.itemsize // words.dtype.itemsize
    elements = (words.shape[0], *leaf.shape[1:])
    # Elements as wide as a word have no axis of their words.
    shape = elements if per_element == 1 else (*elements, per_element)
    return lax.bitcast_convert_type(words.reshape(shape), leaf.dtype)

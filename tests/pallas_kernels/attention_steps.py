"""Runs one step of attention with a backend under test, on the data of a case."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from octavo.pallas_kernels.backend import AttentionBackend, KVLayer
from octavo.pallas_kernels.chunk_tokens import Segments
from octavo.pallas_kernels.paged_attention import attend, paged_batch
from octavo.pallas_kernels.reference_backend import ReferenceBackend
from octavo.pallas_kernels.reference_cache import ReferencePages

from .attention_cases import Case, Shape


@dataclass(frozen=True)
class Subject:
    """A backend under test.

    Attributes:
      backend: What attends.
      pack: Keys and values [pages, page_size, kv_heads, head_dim] to pages in its layout.
      unpack: The inverse, given the kv_heads and the head_dim.
    """

    backend: AttentionBackend
    pack: Callable[[np.ndarray, np.ndarray], KVLayer]
    unpack: Callable[[KVLayer, int, int], tuple[np.ndarray, np.ndarray]]


def _pack_reference(k_pages: np.ndarray, v_pages: np.ndarray) -> ReferencePages:
    k, v = (pages.reshape(*pages.shape[:2], -1) for pages in (k_pages, v_pages))
    return ReferencePages(jax.numpy.asarray(k), jax.numpy.asarray(v))


def _unpack_reference(
    layer: ReferencePages, kv_heads: int, head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    k, v = (
        np.asarray(pages).reshape(*pages.shape[:2], kv_heads, head_dim)
        for pages in (layer.k, layer.v)
    )
    return k, v


REFERENCE = Subject(ReferenceBackend(), _pack_reference, _unpack_reference)


def one_step(backend: AttentionBackend, shape: Shape, num_pages: int) -> Callable[..., Any]:
    """Work lists, then writes and attention of some layers, whose queries are what the last gave.

    Takes the layers' pages, to be donated; q, k, v and sinks; page tables of rows and segments; and
    kv_lens of both and q_lens. Gives the pages after it, and what the last layer attended to.
    """
    options = shape.options

    def step(
        kv: list[KVLayer],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sinks: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        lens: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[list[KVLayer], jax.Array]:
        batch = paged_batch(
            backend,
            tables[0],
            lens[0],
            Segments(tables[1], lens[1], lens[2]) if shape.chunk else None,
            chunk=shape.chunk,
            page_size=shape.page_size,
            num_pages=num_pages,
        )
        after: list[KVLayer] = []
        for layer in kv:
            q, layer = attend(
                q,
                k,
                v,
                layer,
                batch,
                shape.scoring,
                sinks=sinks if options.sinks else None,
                k_scale=options.k_scale,
                v_scale=options.v_scale,
            )
            after.append(layer)
        return after, q

    return step


def step_arguments(subject: Subject, case: Case, layers: int = 1) -> list[Any]:
    """What one_step takes, for layers that are alike."""
    pages = subject.pack(case.k_pages, case.v_pages)
    return [
        [pages] * layers,
        case.q,
        case.k,
        case.v,
        case.sinks,
        (case.page_table, case.segment_page_table),
        (case.kv_lens, case.segment_kv_lens, case.segment_q_lens),
    ]


def compiled_step(subject: Subject, shape: Shape) -> Callable[..., Any]:
    """The step of a shape, jitted."""
    return jax.jit(one_step(subject.backend, shape, shape.num_pages))


def run(
    subject: Subject, step: Callable[..., Any], case: Case
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention, key pages and value pages after a step of one layer."""
    (layer,), attended = step(*step_arguments(subject, case))
    shape = case.shape
    return np.asarray(attended), *subject.unpack(layer, shape.kv_heads, shape.head_dim)

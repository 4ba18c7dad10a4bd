"""The TPU backend as the table of cases tests it: in Pallas' interpreter, pages packed as it does.

Two accesses to a place that nothing orders are an error there, memory that nobody wrote holds NaN,
and a copy moves nothing until somebody waits for it.
"""

import faulthandler
from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.tpu_backend import TpuBackend
from octavo.pallas_kernels.tpu_cache import NARROW, TpuPages, pack_tokens

from .attention_steps import Subject

HANG_S = 900  # a wait for what never comes does not return, not even to a signal handler


def pack(k_pages: np.ndarray, v_pages: np.ndarray) -> TpuPages:
    pages, page_size, kv_heads, head_dim = k_pages.shape
    k, v = (jnp.asarray(array.reshape(-1, kv_heads, head_dim)) for array in (k_pages, v_pages))
    tokens = pack_tokens(k, v)
    return TpuPages(tokens.reshape(pages, page_size, *tokens.shape[1:]), kv_heads)


def unpack(layer: TpuPages, kv_heads: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    pages = np.asarray(layer.pages)
    if head_dim <= NARROW:
        heads = pages.reshape(*pages.shape[:2], -1, pages.shape[-1])[:, :, :kv_heads]
        return heads[..., :head_dim], heads[..., NARROW : NARROW + head_dim]
    return pages[..., 0, :head_dim], pages[..., 1, :head_dim]


def tpu_subject() -> Subject:
    """One that equals no other: steps that were compiled for it are of no other test."""
    return Subject(TpuBackend("races"), partial(pack), unpack)


TPU = tpu_subject()


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """Ends the tests, all of them, where one hangs, and says where it was."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()

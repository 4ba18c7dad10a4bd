"""Pages of the TPU backend to and from keys and values."""

import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.tpu_cache import NARROW, TpuPages, pack_tokens


def pack(k_pages: np.ndarray, v_pages: np.ndarray) -> TpuPages:
    """Keys and values [pages, page_size, kv_heads, head_dim] as one layer."""
    pages, page_size, kv_heads, head_dim = k_pages.shape
    k, v = (jnp.asarray(array.reshape(-1, kv_heads, head_dim)) for array in (k_pages, v_pages))
    tokens = pack_tokens(k, v)
    return TpuPages(tokens.reshape(pages, page_size, *tokens.shape[1:]), kv_heads)


def unpack(layer: TpuPages, kv_heads: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of pack."""
    pages = np.asarray(layer.pages)
    if head_dim <= NARROW:
        heads = pages.reshape(*pages.shape[:2], -1, pages.shape[-1])[:, :, :kv_heads]
        return heads[..., :head_dim], heads[..., NARROW : NARROW + head_dim]
    return pages[..., 0, :head_dim], pages[..., 1, :head_dim]

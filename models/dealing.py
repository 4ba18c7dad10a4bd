"""How a model is dealt to the devices of a mesh: tensor parallelism, where nothing has to divide.

Every device gets equally many kv heads with equally many query heads each, rows of the MLP and rows
of the vocabulary. What does not divide is filled up with zeros, which add nothing to any sum: a
query head of zeros meets columns of zeros in the attention output. Where there are fewer kv heads
than devices, each is copied, and its query heads are dealt to the copies.

Examples, as (query heads, kv heads) over devices: (32, 8) over 8 is 4 query heads and 1 kv head on
each. (9, 3) over 2 is 2 kv heads on each, the fourth of zeros. (9, 3) over 8 is two copies of every
kv head, one with 2 of its 3 query heads and one with the third and one of zeros; two devices have
nothing but zeros. (4, 1) over 8 is eight copies, four of them with a query head.
"""

from dataclasses import dataclass

import numpy as np

from ..configs.model_config import ModelConfig

MODEL_AXIS = "model"
"""Name of the mesh axis over which heads, MLP and vocabulary are dealt."""


@dataclass(frozen=True, kw_only=True)
class Deal:
    """The sizes that are dealt, zeros and copies included; each divides by num_devices but group.

    Attributes:
      num_devices: Of the mesh.
      copies: Of each kv head.
      kv_heads: All of them: copies, and zeros at the end.
      group: Query heads of each kv head.
      intermediate_size: Rows of the MLP.
      vocab_size: Rows of embedding and head.
    """

    num_devices: int
    copies: int
    kv_heads: int
    group: int
    intermediate_size: int
    vocab_size: int

    def is_exact(self, config: ModelConfig) -> bool:
        """Whether every parameter is dealt as it is, without zeros or copies."""
        sizes = (self.kv_heads, self.group, self.intermediate_size, self.vocab_size)
        group = config.num_q_heads // config.num_kv_heads
        return sizes == (
            config.num_kv_heads,
            group,
            config.intermediate_size,
            config.vocab_size,
        )


def deal_for(config: ModelConfig, num_devices: int) -> Deal:
    """How a model is dealt to so many devices."""
    copies = max(1, num_devices // config.num_kv_heads)
    return Deal(
        num_devices=num_devices,
        copies=copies,
        kv_heads=_round_up(config.num_kv_heads * copies, num_devices),
        group=-(-config.num_q_heads // (config.num_kv_heads * copies)),
        intermediate_size=_round_up(config.intermediate_size, num_devices),
        vocab_size=_round_up(config.vocab_size, num_devices),
    )


def deal_parameter(path: str, stored: np.ndarray, config: ModelConfig, deal: Deal) -> np.ndarray:
    """One parameter as the checkpoint brings it, with the zeros and copies of the deal.

    Args:
      path: Such as `layers.3.qkv`.
      stored: As decoder.declared_parameters declares it for one device.
      config: The architecture.
      deal: Of that architecture.
    """
    match path.rpartition(".")[2]:
        case "qkv":
            group = config.num_q_heads // config.num_kv_heads
            queries = _deal_heads(stored[:, :group], deal)
            keys_values = np.repeat(stored[:, group:], deal.copies, axis=0)
            keys_values = _fill(keys_values, 0, deal.kv_heads)
            return np.concatenate([queries, keys_values], axis=1)
        case "attention_output":
            hidden = stored.shape[0]
            heads = stored.T.reshape(config.num_kv_heads, -1, config.head_dim, hidden)
            return _deal_heads(heads, deal).reshape(-1, hidden).T
        case "gate_up" | "down":
            return _fill(stored, 1, deal.intermediate_size)
        case "embedding" | "head":
            return _fill(stored, 0, deal.vocab_size)
        case _:
            return stored


def _deal_heads(heads: np.ndarray, deal: Deal) -> np.ndarray:
    """Query heads [K, G, ...], dealt to the copies of their kv heads."""
    filled = _fill(heads, 1, deal.copies * deal.group)
    dealt = filled.reshape(-1, deal.group, *heads.shape[2:])
    return _fill(dealt, 0, deal.kv_heads)


def _fill(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, size - array.shape[axis])
    return np.pad(array, padding)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

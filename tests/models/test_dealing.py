"""What each device gets of a model: nothing is lost, nothing counted twice, the rest is zeros."""

import numpy as np
import pytest

from octavo.models.dealing import Deal, deal_for, deal_parameter
from octavo.models.decoder import declared_parameters

from .tiny_checkpoints import decoder_parameters, random_tensors, tiny_config

# (query heads, kv heads, devices) to (copies, kv heads, group) of the deal.
DEALS = {
    (32, 8, 1): (1, 8, 4),
    (32, 8, 8): (1, 8, 4),
    (32, 8, 16): (2, 16, 2),
    (9, 3, 2): (1, 4, 3),
    (9, 3, 4): (1, 4, 3),
    (9, 3, 8): (2, 8, 2),
    (4, 1, 8): (8, 8, 1),
    (4, 1, 3): (3, 3, 2),
}


@pytest.mark.parametrize("heads", DEALS)
def test_heads_that_do_not_divide_are_filled_up_or_copied(heads: tuple[int, int, int]) -> None:
    queries, kv_heads, devices = heads
    config = tiny_config(num_q_heads=queries, num_kv_heads=kv_heads)
    deal = deal_for(config, devices)
    assert (deal.copies, deal.kv_heads, deal.group) == DEALS[heads]
    assert deal.kv_heads % devices == 0
    assert deal.kv_heads * deal.group >= queries


def test_one_device_gets_all_as_it_is() -> None:
    config = tiny_config(num_q_heads=9, num_kv_heads=3, intermediate_size=97, vocab_size=321)
    assert deal_for(config, 1).is_exact(config)
    assert not deal_for(config, 2).is_exact(config)


@pytest.mark.parametrize("heads", DEALS)
def test_dealt_parameters_are_the_declared_ones_and_give_the_same_sums(
    heads: tuple[int, int, int],
) -> None:
    """A layer in NumPy, all devices together, against the same with what the checkpoint brings."""
    queries, kv_heads, devices = heads
    config = tiny_config(
        num_q_heads=queries,
        num_kv_heads=kv_heads,
        intermediate_size=97,
        vocab_size=321,
        tie_word_embeddings=False,
    )
    stored = decoder_parameters(config, random_tensors(config))
    deal = deal_for(config, devices)
    dealt = {path: deal_parameter(path, value, config, deal) for path, value in stored.items()}
    for path, spec in declared_parameters(config, "float32", devices).items():
        assert dealt[path].shape == spec.shape, path
        divided = [size for size, axis in zip(spec.shape, spec.axes, strict=True) if axis]
        assert not any(size % devices for size in divided), path

    x = np.random.default_rng(0).normal(size=(5, config.hidden_size))
    one = deal_for(config, 1)
    np.testing.assert_allclose(_attention(x, dealt, deal), _attention(x, stored, one), atol=1e-5)
    np.testing.assert_allclose(_mlp(x, dealt), _mlp(x, stored), atol=1e-5)
    rows = config.vocab_size
    for table in ("embedding", "head"):
        np.testing.assert_array_equal(dealt[table][:rows], stored[table])
        assert not dealt[table][rows:].any()


def _attention(x: np.ndarray, parameters: dict[str, np.ndarray], deal: Deal) -> np.ndarray:
    """What matters of it here: which query meets which key, value and column of the output."""
    qkv = np.einsum("td,kghd->tkgh", x, parameters["layers.0.qkv"])
    q, k, v = qkv[:, :, : deal.group], qkv[:, :, deal.group], qkv[:, :, deal.group + 1]
    scores = np.einsum("tkgh,skh->ktgs", q, k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("ktgs,skh->tkgh", weights, v).reshape(len(x), -1)
    return mixed @ parameters["layers.0.attention_output"].T


def _mlp(x: np.ndarray, parameters: dict[str, np.ndarray]) -> np.ndarray:
    gate, up = np.einsum("td,gfd->gtf", x, parameters["layers.0.gate_up"])
    return (gate / (1 + np.exp(-gate)) * up) @ parameters["layers.0.down"].T

"""A Llama in NumPy: no pages, no batch, no fused parts; the whole context in one growing array.

Written from the papers, not from models.decoder, which it is there to test. It reads the decoder's
parameters by path, so that it runs every checkpoint that the loaders bring.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from octavo.configs.model_config import ModelConfig

Cache = list[tuple[np.ndarray, np.ndarray]]
"""Rotated keys and values of each layer, [tokens, kv_heads, head_dim]."""


class NumpyDecoder:
    """Computes in the parameters' own dtype."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, np.ndarray]) -> None:
        self.config = config
        self._parameters = {path: np.asarray(value) for path, value in parameters.items()}

    def empty_cache(self) -> Cache:
        shape = (0, self.config.num_kv_heads, self.config.head_dim)
        empty = np.zeros(shape, self._parameters["embedding"].dtype)
        return [(empty, empty) for _ in range(self.config.num_layers)]

    def hidden(self, token_ids: Sequence[int], cache: Cache) -> np.ndarray:
        """Final hidden states of tokens that continue `cache`, which grows by them."""
        x = self._parameters["embedding"][list(token_ids)]
        positions = len(cache[0][0]) + np.arange(len(token_ids))
        for index in range(self.config.num_layers):
            x = x + self._attention(index, x, positions, cache)
            x = x + self._mlp(index, x)
        return self._norm("final_norm", x)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        head = "embedding" if self.config.tie_word_embeddings else "head"
        return hidden @ self._parameters[head].T

    def _norm(self, path: str, x: np.ndarray) -> np.ndarray:
        root = np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(self.config.rms_norm_eps))
        return x / root * self._parameters[path]

    def _attention(
        self, index: int, x: np.ndarray, positions: np.ndarray, cache: Cache
    ) -> np.ndarray:
        config = self.config
        x = self._norm(f"layers.{index}.attention_norm", x)
        qkv = self._parameters[f"layers.{index}.qkv"]
        heads = np.einsum("td,kghd->tkgh", x, qkv, optimize=True)
        q = rotate(heads[:, :, :-2], positions, config)
        k = rotate(heads[:, :, -2], positions, config)
        keys, values = (
            np.concatenate([old, new])
            for old, new in zip(cache[index], (k, heads[:, :, -1]), strict=True)
        )
        cache[index] = keys, values
        scores = np.einsum("tkgh,skh->kgts", q, keys, optimize=True)
        scores *= np.float32(config.head_dim**-0.5)
        is_later = np.arange(len(keys)) > positions[:, None]
        scores[:, :, is_later] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("kgts,skh->tkgh", weights, values, optimize=True)
        return mixed.reshape(len(x), -1) @ self._parameters[f"layers.{index}.attention_output"].T

    def _mlp(self, index: int, x: np.ndarray) -> np.ndarray:
        x = self._norm(f"layers.{index}.mlp_norm", x)
        gate, up = (x @ part.T for part in self._parameters[f"layers.{index}.gate_up"])
        return (gate / (1 + np.exp(-gate)) * up) @ self._parameters[f"layers.{index}.down"].T


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a token of each pair; Llama 3.1's three ranges of wavelengths written out."""
    half = config.head_dim // 2
    frequencies = np.array([config.rope_theta ** (-i / half) for i in range(half)])
    if (scaling := config.rope_scaling) is None:
        return frequencies
    stretched = []
    for frequency in frequencies:
        turns = scaling.original_max_position * frequency / (2 * np.pi)
        if turns < scaling.low_freq_factor:
            stretched.append(frequency / scaling.factor)
        elif turns > scaling.high_freq_factor:
            stretched.append(frequency)
        else:
            span = scaling.high_freq_factor - scaling.low_freq_factor
            smooth = (turns - scaling.low_freq_factor) / span
            stretched.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
    return np.array(stretched)


def rotate(x: np.ndarray, positions: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Dimensions i and i + half of each head are one complex number, turned by its angle."""
    half = config.head_dim // 2
    turn = np.exp(1j * np.outer(positions, rope_frequencies(config)))
    turn = turn.reshape(len(positions), *(1,) * (x.ndim - 2), half)
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)

"""The decoder: token ids and pages in, hidden states and logits out. Parameters are declared here.

One `Decoder` serves every architecture that ModelConfig describes. Calls are pure: the KV pages go
in and come out. It knows arrays and a `PagedBatch`; it does not know requests, slots or sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from ..configs.model_config import ModelConfig
from ..pallas_kernels.paged_attention import KVLayer, PagedBatch, attend
from .layers import apply_rope, gated_silu, linear, rms_norm, rope_table

RopeTable = tuple[jax.Array, jax.Array]


def _parameter(
    shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: Any
) -> nnx.Param[jax.Array]:
    """Declares a parameter: shape, dtype, and the logical axis that each dimension shards over.

    Values come from a checkpoint, so a declaration never computes any: see `declared_parameters`.
    """
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


class DecoderLayer(nnx.Module):
    """Attention over pages and a gated MLP, each with a norm before and a residual around.

    The layers of a model are alike, so one trace serves them all (`_run_layer`).
    """

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        """Declares the layer's parameters.

        qkv holds, for each kv head, its query heads, then its key, then its value, so that sharding
        over kv heads keeps together what works together.
        """
        hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        queries, kv_heads = config.num_q_heads, config.num_kv_heads
        group = queries // kv_heads
        self.config = config
        self.attention_norm = _parameter((hidden,), (None,), "float32")
        self.qkv = _parameter(
            (kv_heads, group + 2, head_dim, hidden), ("kv_heads", None, None, None), dtype
        )
        self.attention_output = _parameter((hidden, queries * head_dim), (None, "kv_heads"), dtype)
        self.mlp_norm = _parameter((hidden,), (None,), "float32")
        self.gate_up = _parameter((2, ffn, hidden), (None, "ffn", None), dtype)
        self.down = _parameter((hidden, ffn), (None, "ffn"), dtype)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        rope: RopeTable,
        kv_layer: KVLayer,
        batch: PagedBatch,
    ) -> tuple[Float[Array, "tokens hidden"], KVLayer]:
        """The residual stream after this layer, and its pages with the tokens' KV written."""
        config = self.config
        tokens, group = x.shape[0], config.num_q_heads // config.num_kv_heads
        with jax.named_scope("attention"):
            normed = rms_norm(x, self.attention_norm[...], config.rms_norm_eps)
            qkv = linear(normed, self.qkv[...])
            q = apply_rope(qkv[:, :, :group], rope)
            k = apply_rope(qkv[:, :, group], rope)
            attended, kv_layer = attend(
                q.reshape(tokens, config.num_q_heads, config.head_dim),
                k,
                qkv[:, :, group + 1],
                kv_layer,
                batch,
                scale=config.head_dim**-0.5,
            )
            x = x + linear(attended.reshape(tokens, -1), self.attention_output[...])
        with jax.named_scope("mlp"):
            normed = rms_norm(x, self.mlp_norm[...], config.rms_norm_eps)
            x = x + linear(gated_silu(linear(normed, self.gate_up[...])), self.down[...])
        return x, kv_layer


@jax.jit
def _run_layer(
    layer: DecoderLayer, x: jax.Array, rope: RopeTable, kv_layer: KVLayer, batch: PagedBatch
) -> tuple[jax.Array, KVLayer]:
    # Its own jit so that the layer is traced and lowered once, not once for each of its copies.
    return layer(x, rope, kv_layer, batch)


class Decoder(nnx.Module):
    """A stack of layers between an embedding and a head."""

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        """Declares the parameters; the head is the embedding where the model ties them."""
        self.config = config
        self.embedding = _parameter((config.vocab_size, config.hidden_size), ("vocab", None), dtype)
        self.layers = nnx.List([DecoderLayer(config, dtype) for _ in range(config.num_layers)])
        self.final_norm = _parameter((config.hidden_size,), (None,), "float32")
        self.head = (
            None
            if config.tie_word_embeddings
            else _parameter((config.vocab_size, config.hidden_size), ("vocab", None), dtype)
        )

    def __call__(
        self,
        token_ids: Int32[Array, " tokens"],
        kv: Sequence[KVLayer],
        batch: PagedBatch,
    ) -> tuple[Float[Array, "tokens hidden"], list[KVLayer]]:
        """Hidden states of the step's tokens after the final norm, and the pages with their KV.

        Token ids must be in [0, vocab_size): out of range they would silently read another row.
        """
        x = self.embedding[...][token_ids].astype(jnp.float32)
        # Behind a barrier the step's tables are computed once; XLA would repeat them in each layer.
        rope, batch = lax.optimization_barrier((rope_table(batch.positions, self.config), batch))
        kv_after: list[KVLayer] = []
        for layer, kv_layer in zip(self.layers, kv, strict=True):
            x, kv_layer = _run_layer(layer, x, rope, kv_layer, batch)
            kv_after.append(kv_layer)
        return rms_norm(x, self.final_norm[...], self.config.rms_norm_eps), kv_after

    def logits(self, hidden: Float[Array, "positions hidden"]) -> Float[Array, "positions vocab"]:
        """Scores of every token at the given positions; float32."""
        with jax.named_scope("head"):
            head = self.embedding if self.head is None else self.head
            return linear(hidden, head[...])


@dataclass(frozen=True)
class ParameterSpec:
    """What a checkpoint must bring for one parameter.

    Attributes:
      shape: As the decoder declares it.
      dtype: As the decoder declares it.
      axes: For each dimension, the logical axis that it shards over, or None.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]


def declared_parameters(config: ModelConfig, dtype: str) -> dict[str, ParameterSpec]:
    """Every parameter of a decoder by its path, such as `layers.3.qkv`. Allocates nothing."""
    _, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))
    return {
        ".".join(str(part) for part in path): ParameterSpec(
            variable.get_value().shape,
            variable.get_value().dtype,
            variable.get_metadata()["axes"],
        )
        for path, variable in nnx.to_flat_state(state)
    }


def decoder_from_parameters(
    config: ModelConfig, dtype: str, parameters: dict[str, jax.Array]
) -> Decoder:
    """A decoder that holds the given arrays.

    Raises:
      ValueError: A parameter is missing, extra, misshapen or of another dtype; names it.
    """
    declared = declared_parameters(config, dtype)
    for path in declared.keys() ^ parameters.keys():
        raise ValueError(f"parameter {path} is {'missing' if path in declared else 'not declared'}")
    for path, spec in declared.items():
        array = parameters[path]
        if array.shape != spec.shape or array.dtype != spec.dtype:
            raise ValueError(
                f"parameter {path} is {array.dtype}{list(array.shape)}; "
                f"the decoder declares {spec.dtype}{list(spec.shape)}"
            )
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))
    flat = [
        (path, variable.replace(parameters[".".join(str(part) for part in path)]))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))

"""The decoder: token ids and pages in, hidden states and logits out. Parameters are declared here.

One `Decoder` serves every architecture that ModelConfig describes. Calls are pure: the KV pages go
in and come out. It knows arrays and a `PagedBatch`; it does not know requests, slots or sampling.

A call is what one device does with its share of the parameters (`models.dealing`): under shard_map,
each sees its own heads, rows of the MLP and rows of the vocabulary, and a layer adds up twice over
all devices, at the end of its attention and of its MLP. One device is a mesh of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from ..configs.model_config import ModelConfig
from ..pallas_kernels.backend import KVLayer, Scoring
from ..pallas_kernels.paged_attention import PagedBatch, attend
from .dealing import MODEL_AXIS, Deal, deal_for
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

    def __init__(self, config: ModelConfig, dtype: str, deal: Deal) -> None:
        """Declares the layer's parameters.

        qkv holds, for each kv head, its query heads, then its key, then its value, so that sharding
        over kv heads keeps together what works together.
        """
        hidden, ffn, head_dim = config.hidden_size, deal.intermediate_size, config.head_dim
        kv_heads, group = deal.kv_heads, deal.group
        self.config = config
        self.deal = deal
        self.attention_norm = _parameter((hidden,), (None,), "float32")
        self.qkv = _parameter(
            (kv_heads, group + 2, head_dim, hidden), ("kv_heads", None, None, None), dtype
        )
        self.attention_output = _parameter(
            (hidden, kv_heads * group * head_dim), (None, "kv_heads"), dtype
        )
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
        config, group = self.config, self.deal.group
        tokens = x.shape[0]
        with jax.named_scope("attention"):
            normed = rms_norm(x, self.attention_norm[...], config.rms_norm_eps)
            qkv = linear(normed, self.qkv[...])
            q = apply_rope(qkv[:, :, :group], rope)
            k = apply_rope(qkv[:, :, group], rope)
            attended, kv_layer = attend(
                q.reshape(tokens, -1, config.head_dim),
                k,
                qkv[:, :, group + 1],
                kv_layer,
                batch,
                Scoring(scale=config.head_dim**-0.5),
            )
            mixed = linear(attended.reshape(tokens, -1), self.attention_output[...])
            x = x + _sum_over_devices(mixed, self.deal)
        with jax.named_scope("mlp"):
            normed = rms_norm(x, self.mlp_norm[...], config.rms_norm_eps)
            mixed = linear(gated_silu(linear(normed, self.gate_up[...])), self.down[...])
            x = x + _sum_over_devices(mixed, self.deal)
        return x, kv_layer


@jax.jit
def _run_layer(
    layer: DecoderLayer, x: jax.Array, rope: RopeTable, kv_layer: KVLayer, batch: PagedBatch
) -> tuple[jax.Array, KVLayer]:
    # Its own jit so that the layer is traced and lowered once, not once for each of its copies.
    return layer(x, rope, kv_layer, batch)


class Decoder(nnx.Module):
    """A stack of layers between an embedding and a head."""

    def __init__(self, config: ModelConfig, dtype: str, num_devices: int) -> None:
        """Declares the parameters; the head is the embedding where the model ties them."""
        self.config = config
        self.deal = deal = deal_for(config, num_devices)
        vocabulary = (deal.vocab_size, config.hidden_size)
        self.embedding = _parameter(vocabulary, ("vocab", None), dtype)
        layers = [DecoderLayer(config, dtype, deal) for _ in range(config.num_layers)]
        self.layers = nnx.List(layers)
        self.final_norm = _parameter((config.hidden_size,), (None,), "float32")
        self.head = (
            None if config.tie_word_embeddings else _parameter(vocabulary, ("vocab", None), dtype)
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
        x = self._embed(token_ids)
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
            logits = linear(hidden, head[...])
            if self.deal.num_devices > 1:
                logits = lax.all_gather(logits, MODEL_AXIS, axis=1, tiled=True)
            return logits[:, : self.config.vocab_size]

    def _embed(self, token_ids: Int32[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        table = self.embedding[...]
        if self.deal.num_devices == 1:
            return table[token_ids].astype(jnp.float32)
        row = token_ids - lax.axis_index(MODEL_AXIS) * table.shape[0]
        is_own = (row >= 0) & (row < table.shape[0])
        own = jnp.where(is_own[:, None], table[jnp.where(is_own, row, 0)], 0)
        return lax.psum(own.astype(jnp.float32), MODEL_AXIS)


def _sum_over_devices(x: Float[Array, "tokens hidden"], deal: Deal) -> jax.Array:
    """The sum of what every device has of x. One device has it all, and needs no mesh."""
    return x if deal.num_devices == 1 else lax.psum(x, MODEL_AXIS)


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


def declared_parameters(
    config: ModelConfig, dtype: str, num_devices: int = 1
) -> dict[str, ParameterSpec]:
    """Every parameter of a decoder by its path, such as `layers.3.qkv`. Allocates nothing.

    For one device they are what a checkpoint brings; for more, with the zeros and copies of the
    deal.
    """
    _, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype, num_devices)))
    return {
        ".".join(str(part) for part in path): ParameterSpec(
            variable.get_value().shape,
            variable.get_value().dtype,
            variable.get_metadata()["axes"],
        )
        for path, variable in nnx.to_flat_state(state)
    }


def decoder_from_parameters(
    config: ModelConfig,
    dtype: str,
    parameters: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    num_devices: int = 1,
) -> Decoder:
    """A decoder that holds the given arrays, or what describes them, as they are declared.

    Raises:
      ValueError: A parameter is missing, extra, misshapen or of another dtype; names it.
    """
    declared = declared_parameters(config, dtype, num_devices)
    for path in declared.keys() ^ parameters.keys():
        raise ValueError(f"parameter {path} is {'missing' if path in declared else 'not declared'}")
    for path, spec in declared.items():
        array = parameters[path]
        if array.shape != spec.shape or array.dtype != spec.dtype:
            raise ValueError(
                f"parameter {path} is {array.dtype}{list(array.shape)}; "
                f"the decoder declares {spec.dtype}{list(spec.shape)}"
            )
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype, num_devices)))
    flat = [
        (path, variable.replace(parameters[".".join(str(part) for part in path)]))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))

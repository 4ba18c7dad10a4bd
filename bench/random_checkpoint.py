"""A checkpoint of random weights, made where they are needed: no file, no host memory."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp

from ..configs.model_config import ModelConfig
from ..models.checkpoint_format import Checkpoint
from ..models.decoder import ParameterSpec
from ..models.stored_tensors import ShardingOf


class RandomCheckpoint(Checkpoint):
    """Weights of an architecture, the same for the same one; outputs are noise, and finite."""

    def load(
        self, declared: Mapping[str, ParameterSpec], sharding_of: ShardingOf
    ) -> dict[str, jax.Array]:
        """Makes every declared parameter."""
        return {
            path: _maker(spec, sharding_of(spec))(jax.random.key(seed))
            for seed, (path, spec) in enumerate(sorted(declared.items()))
        }


def random_checkpoint(config: ModelConfig) -> RandomCheckpoint:
    """An open checkpoint of that architecture, without a tokenizer and without an end."""
    return RandomCheckpoint(
        path=Path("random"),
        config=config,
        eos_token_ids=frozenset(),
        tokenizer_source=Path("random"),
    )


@cache
def _maker(spec: ParameterSpec, sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    """Compiled once for all parameters that are declared alike."""

    def make(key: jax.Array) -> jax.Array:
        if len(spec.shape) == 1:
            return jnp.ones(spec.shape, spec.dtype)  # of a norm
        # A product keeps the size of what goes in.
        return jax.random.normal(key, spec.shape, spec.dtype) * spec.shape[-1] ** -0.5

    return jax.jit(make, out_shardings=sharding)

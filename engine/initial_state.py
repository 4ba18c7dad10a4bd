"""What a device holds before the first step: parameters, empty pages, slots that nobody holds.

Described, for those who compile for devices that are not there, or made.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..configs.engine_config import EngineConfig
from ..configs.model_config import ModelConfig
from ..models.checkpoint_format import Checkpoint
from ..models.dealing import deal_for, deal_parameter
from ..models.decoder import Decoder, ParameterSpec, declared_parameters, decoder_from_parameters
from ..pallas_kernels.backend import AttentionBackend, AttentionShape, KVLayer, KVShape
from .device_state import DeviceState, Slots, empty_slots
from .kv_budget import longest_context
from .logit_rules import RuleTables, empty_tables
from .placement import kv_sharding, parameter_sharding, replicated
from .sampling_checks import MAX_LOGIT_BIAS
from .step_shapes import StepShapes


def kv_shape(config: EngineConfig, model: ModelConfig) -> KVShape:
    """What one layer's pages hold on each device."""
    deal = deal_for(model, config.tensor_parallel_size)
    return KVShape(
        kv_heads=deal.kv_heads // deal.num_devices,
        head_dim=model.head_dim,
        page_size=config.page_size,
        dtype=config.dtype,
    )


def attention_shape(config: EngineConfig, model: ModelConfig) -> AttentionShape:
    """The most that each device's attention will be asked for.

    Raises:
      ValueError: max_model_len is more than the model was trained for.
    """
    shapes = StepShapes.from_config(config)
    deal = deal_for(model, config.tensor_parallel_size)
    kv = kv_shape(config, model)
    return AttentionShape(
        kv=kv,
        q_heads=kv.kv_heads * deal.group,
        rows=max(key.rows for key in shapes.all_keys()),
        chunk=shapes.chunks[-1],
        segments=shapes.max_segments,
        pages_per_seq=pages_per_seq(config, longest_context(config, model)),
    )


def pages_per_seq(config: EngineConfig, max_model_len: int) -> int:
    """Columns of the page table."""
    # The last token of a request is never fed back, so it needs no place.
    return -(-(max_model_len - 1) // config.page_size)


@dataclass(frozen=True)
class StateMaker:
    """Makes the state of an engine that nobody uses yet, or describes it.

    Attributes:
      config: Sizes.
      model: The architecture.
      backend: Whose layout the pages have.
      mesh: Where it lies.
    """

    config: EngineConfig
    model: ModelConfig
    backend: AttentionBackend
    mesh: Mesh

    @property
    def bytes_per_page(self) -> int:
        """Of one page over all layers, on each device."""
        shape = kv_shape(self.config, self.model)
        return self.model.num_layers * self.backend.bytes_per_page(shape)

    def make(self, num_pages: int, max_model_len: int) -> DeviceState:
        """Zeroed arrays on the devices."""
        return DeviceState(*self._jitted(num_pages, max_model_len)())

    def describe(self, num_pages: int, max_model_len: int) -> DeviceState:
        """Their shapes and shardings."""
        return DeviceState(*jax.eval_shape(self._jitted(num_pages, max_model_len)))

    def _jitted(
        self, num_pages: int, max_model_len: int
    ) -> Callable[[], tuple[list[KVLayer], Slots, RuleTables]]:
        config, model, mesh = self.config, self.model, self.mesh
        columns = pages_per_seq(config, max_model_len)
        shape = kv_shape(config, model)

        def allocate() -> list[KVLayer]:
            return [self.backend.allocate(shape, num_pages) for _ in range(model.num_layers)]

        # Each device allocates the pages of its own heads.
        allocate_on_each = jax.shard_map(
            allocate, mesh=mesh, in_specs=(), out_specs=kv_sharding(mesh).spec, check_vma=False
        )

        def make() -> tuple[list[KVLayer], Slots, RuleTables]:
            return (
                allocate_on_each(),
                empty_slots(config.max_num_seqs, columns, config.max_stop_ids),
                empty_tables(config.max_num_seqs, model.vocab_size, MAX_LOGIT_BIAS),
            )

        everywhere = replicated(mesh)
        return jax.jit(make, out_shardings=(kv_sharding(mesh), everywhere, everywhere))


def load_decoder(checkpoint: Checkpoint, config: EngineConfig, mesh: Mesh) -> Decoder:
    """The checkpoint's parameters on the devices of a mesh.

    Raises:
      CheckpointError: The checkpoint is damaged or does not fit its own description.
    """
    model, num_devices = checkpoint.config, mesh.size
    stored = declared_parameters(model, config.dtype)
    deal = deal_for(model, num_devices)
    if deal.is_exact(model):
        parameters = checkpoint.load(stored, partial(_sharding_of, mesh))
    else:
        # What does not divide cannot be sharded as it is stored: it takes the way over the host.
        on_host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        parameters = checkpoint.load(stored, lambda spec: on_host)
        for path, spec in declared_parameters(model, config.dtype, num_devices).items():
            dealt = deal_parameter(path, np.asarray(parameters.pop(path)), model, deal)
            parameters[path] = jax.device_put(dealt, _sharding_of(mesh, spec))
    return decoder_from_parameters(model, config.dtype, parameters, num_devices)


def describe_decoder(model: ModelConfig, config: EngineConfig, mesh: Mesh) -> Decoder:
    """A decoder that holds shapes and shardings in place of parameters."""
    declared = declared_parameters(model, config.dtype, mesh.size)
    parameters = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=_sharding_of(mesh, spec))
        for path, spec in declared.items()
    }
    return decoder_from_parameters(model, config.dtype, parameters, mesh.size)


def bytes_per_device(tree: Any) -> int:
    """Of all arrays in a pytree, be they there or only described, on each device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _sharding_of(mesh: Mesh, spec: ParameterSpec) -> NamedSharding:
    return parameter_sharding(mesh, spec.axes)

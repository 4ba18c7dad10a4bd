"""Where arrays lie: the device mesh, and how a parameter's logical axes map onto it.

One device is a mesh of one, not another path.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..models.dealing import MODEL_AXIS
from ..pallas_kernels.backend import KV_HEAD_AXIS

# Logical axes of parameters (declared in models.decoder) and the mesh axis that splits each.
_MESH_AXIS = {"vocab": MODEL_AXIS, "kv_heads": MODEL_AXIS, "ffn": MODEL_AXIS}


def make_mesh(devices: list[jax.Device]) -> Mesh:
    """A mesh whose one axis splits heads, the MLP and the vocabulary."""
    return jax.make_mesh(
        (len(devices),), (MODEL_AXIS,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,)
    )


def parameter_sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """The sharding of a parameter with these logical axes."""
    return NamedSharding(mesh, PartitionSpec(*(axis and _MESH_AXIS[axis] for axis in axes)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def kv_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of every leaf of the KV pages: each device has the pages of its own heads."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * KV_HEAD_AXIS, MODEL_AXIS))

"""Which attention backend runs: chosen by platform and shape, here and nowhere else."""

from dataclasses import dataclass

import jax

from ..configs.engine_config import AttentionName
from .backend import AttentionBackend, AttentionShape, UnsupportedShape
from .gpu_backend import gpu_backend
from .reference_backend import ReferenceBackend
from .tpu_backend import TpuBackend


@dataclass(frozen=True)
class Choice:
    """A backend, and why it is not the platform's own kernels.

    Attributes:
      backend: What attends.
      reason: Why the platform's kernels do not run; empty where they do, where there are none, and
        where the reference was asked for.
    """

    backend: AttentionBackend
    reason: str = ""


def choose(requested: AttentionName, device: jax.Device, shape: AttentionShape) -> Choice:
    """The backend for a device, there or only compiled for.

    Args:
      requested: "auto" falls back on the reference; any other name is that or an error.
      device: One of those that will run it.
      shape: The largest that it will be asked for.

    Raises:
      UnsupportedShape: The backend that was asked for cannot run the shape.
      ValueError: It is of another platform.
    """
    if requested == "reference":
        return Choice(ReferenceBackend())
    own = _kernels_of(device)
    if requested == "auto" and own is None:
        return Choice(ReferenceBackend())
    if own is None or requested not in ("auto", own.name):
        raise ValueError(
            f"attention is {requested!r}; it must be 'auto' or 'reference'"
            f"{f' or {own.name!r}' if own else ''} on this platform, {device.platform}"
        )
    reason = own.refusal(shape)
    if reason is None:
        return Choice(own)
    if requested == "auto":
        return Choice(ReferenceBackend(), reason)
    raise UnsupportedShape(f"attention is {requested!r}, whose kernels cannot run this: {reason}")


def _kernels_of(device: jax.Device) -> AttentionBackend | None:
    match device.platform:
        case "tpu":
            return TpuBackend(device_kind=device.device_kind)
        case "gpu" | "cuda":
            return gpu_backend(device)
        case _:
            return None

"""`octavo convert` as a function: any checkpoint into Octavo's own format."""

from pathlib import Path

import jax

from .checkpoint import CheckpointError, open_checkpoint
from .decoder import declared_parameters
from .orbax_checkpoint import save_orbax
from .tokenizer import load_tokenizer


def convert(source: Path, destination: Path, dtype: str) -> None:
    """Writes a checkpoint as a folder that loads fastest.

    With the dtype that the source stores, or a wider one, the parameters keep every bit.

    Args:
      source: Whatever `open_checkpoint` reads.
      destination: The new folder; must not exist.
      dtype: Of all parameters but the norms, which are float32.

    Raises:
      CheckpointError: The source cannot be loaded, or the destination exists or cannot be written.
    """
    if destination.exists():
        raise CheckpointError(f"{destination}: exists already; nothing is ever overwritten")
    checkpoint = open_checkpoint(source)
    load_tokenizer(checkpoint.tokenizer_source)  # that it can be served is seen now, not then
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    parameters = checkpoint.load(declared_parameters(checkpoint.config, dtype), lambda _: host)
    save_orbax(destination, checkpoint, parameters)

"""The executor: owns the device state and runs steps on it. It consumes (key, packed array) only.

The same stream of pairs replayed elsewhere gives the same results, so a log of it reproduces a
run. Exactly one array goes up and one comes down per step: `_upload` and `fetch` are the only
places in the engine where data crosses between host and device.
"""

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..models.decoder import Decoder
from .device_state import DeviceState
from .executables import ExecutableTable
from .step_shapes import StepKey


class Executor:
    """Runs compiled steps over one donated state."""

    def __init__(
        self,
        table: ExecutableTable,
        decoder: Decoder,
        state: DeviceState,
        packed_sharding: NamedSharding,
    ) -> None:
        """Takes over `state`: its arrays are donated to the first step."""
        self._table = table
        self._parameters = jax.tree.leaves(decoder)
        self._state = jax.tree.leaves(state)
        self._packed_sharding = packed_sharding

    def dispatch(self, key: StepKey, packed: np.ndarray) -> jax.Array:
        """Starts a step and returns its result, which is not there yet: fetch waits for it.

        The caller must not touch `packed` again: on the CPU the device reads it in place.

        Raises:
          KeyError: No such executable was compiled.
        """
        executable = self._table[key]
        result, *self._state = executable(*self._parameters, *self._state, self._upload(packed))
        return result

    def fetch(self, result: jax.Array) -> np.ndarray:
        """Waits for a step and brings its result to the host."""
        return np.asarray(result)

    def _upload(self, packed: np.ndarray) -> jax.Array:
        return jax.device_put(packed, self._packed_sharding)

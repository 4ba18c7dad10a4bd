"""The counter that proves that nothing compiles after READY must itself count."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from octavo.engine.compilation import compile_events


def test_a_compilation_is_counted_and_a_run_is_not():
    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        return x * 2 + 7

    x = jnp.zeros(3)
    before = compile_events()
    double(x)
    assert compile_events() == before + 1
    double(x)
    assert compile_events() == before + 1
    double(jnp.zeros(3, jnp.int32))
    assert compile_events() > before + 1


_PROGRAM = """
import sys
from pathlib import Path
import jax
from octavo.engine.compilation import compile_events, use_persistent_cache

hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
)
use_persistent_cache(Path(sys.argv[1]))
jax.jit(lambda x: x * 2 + 7).lower(jax.ShapeDtypeStruct((3,), "float32")).compile()
print(len(hits), compile_events())
"""


@pytest.mark.parametrize("folder", ["cache", "not/there/yet"])
def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path, folder: str):
    """However small it is and however quickly it compiled; and it counts all the same."""
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / folder)]
    outputs = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert outputs == [["0", "1"], ["1", "1"]]

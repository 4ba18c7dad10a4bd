"""Times of what a device does many times over, each time with what the last one left."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from .device_parts import Findings

REPETITIONS = 5


def per_call(
    loop: Callable[..., jax.Array], count: int, *arguments: Any, donated: tuple[int, ...] = ()
) -> Findings:
    """Times one call inside a compiled loop, so that neither host nor dispatch is in it.

    Args:
      loop: Given a number of calls, a Python int, and the arguments: makes them depend on each
        other and returns what the last one left.
      count: How many calls.
      arguments: Arrays; those that are donated are replaced by what the loop returns.
      donated: At most one index among the arguments.

    Returns:
      seconds_per_call, from the shortest of several runs; compile_s; and a failure where numbers
      came out that are none.
    """
    began_s = time.perf_counter()
    # Indices are those of the arguments, behind the count.
    jitted = jax.jit(partial(loop, count), donate_argnums=donated)
    compiled = jitted.lower(*arguments).compile()
    compile_s = time.perf_counter() - began_s
    values = list(arguments)
    times_s: list[float] = []
    result = None
    for _ in range(1 + REPETITIONS):
        began_s = time.perf_counter()
        result = jax.block_until_ready(compiled(*values))
        times_s.append(time.perf_counter() - began_s)
        for index in donated:
            values[index] = result
    found: Findings = {
        # The first run touches memory and code that no later one has to.
        "seconds_per_call": min(times_s[1:]) / count,
        "calls": count,
        "compile_s": compile_s,
    }
    sample = np.asarray(jax.tree.leaves(result)[0].ravel()[:4096], np.float32)
    if not np.isfinite(sample).all():
        found["failures"] = ["the last result holds NaN or infinity"]
    return found

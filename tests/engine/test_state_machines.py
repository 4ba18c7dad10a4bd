"""State machines over memory, scheduler and engine: a share by default, a million on demand.

They fail on a page that is lost, held twice, read after it was given away or before it was written;
on a request that waits for ever; and on an answer that differs from the request's run alone. What
they found is in the messages of the commits that mended it.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .engine_machine import EngineMachine
from .memory_machine import MemoryMachine
from .scheduler_machine import SchedulerMachine
from .state_machine import CountedMachine, run_machine

ROOT = Path(__file__).parents[2]

# Runs of each machine, of 500 examples each and with seeds of their own.
SHARDS = {"Memory": 8, "Scheduler": 9, "Engine": 8}
EXAMPLES, STEPS = 500, 60
MIN_OPERATIONS = 1_000_000


@pytest.mark.parametrize("machine", [MemoryMachine, SchedulerMachine, EngineMachine])
def test_a_share(machine: type[CountedMachine]):
    counts = run_machine(machine, run_seed=0, examples=60, steps=50)
    assert counts.total() > 2_000


@pytest.mark.state
def test_a_million_operations(capsys: pytest.CaptureFixture[str]):
    """On all cores, each run in a process of its own, without type checks."""
    runs = [(name, seed) for seed in range(max(SHARDS.values())) for name in SHARDS]
    runs = [(name, seed) for name, seed in runs if seed < SHARDS[name]]
    total: dict[str, Counter[str]] = {name: Counter() for name in SHARDS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (name, _), counts in zip(runs, pool.map(_run_shard, runs), strict=True):
            total[name] += counts
    num_operations = sum(counts.total() for counts in total.values())
    with capsys.disabled():
        for name, counts in total.items():
            print(f"\n{name}: {counts.total():,} operations, {dict(counts)}", end="")
        print(f"\n{num_operations:,} operations in all")
    assert num_operations >= MIN_OPERATIONS


def _run_shard(run: tuple[str, int]) -> Counter[str]:
    name, seed = run
    command = [sys.executable, "-m", "tests.engine.state_machine", name]
    done = subprocess.run(
        [*command, str(seed + 1), str(EXAMPLES), str(STEPS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{name}, seed {seed + 1}:\n{done.stderr[-6000:]}"
    return Counter(json.loads(done.stdout))

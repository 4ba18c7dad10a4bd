"""Case 5.6: engines that are fed the same calls decide the same, in this process and in others."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from .fakes import Clock, add_request, fake_engine, request, small_config, step

ROOT = Path(__file__).parents[2]


def digest(policy: str) -> str:
    """Of all bytes that a device is sent under random load; the same calls each time."""
    rng = random.Random(policy)
    config = small_config(
        policy=policy,
        max_num_seqs=3,
        max_tenant_running=2,
        priority_ageing_s=1.0,
        default_ttft_target_s=1.0,
        inter_token_target_ms=1.1,
    )
    clock = Clock()
    engine, executor = fake_engine(config, 14, clock, max_host_pages=4)
    live: list[str] = []
    for number in range(300):
        clock.now_s += rng.choice([0.0, 0.001, 0.1])
        if rng.random() < 0.4:
            one = request(
                f"r{number}",
                [1 + number % 2, *rng.choices(range(3), k=rng.randint(0, 15))],
                max_tokens=rng.randint(1, 20),
                temperature=1.0,  # seeds are picked by the engine
                arrival_s=clock.now_s,
                tenant=rng.choice(["", "a", "b", "tenant"]),
                cache_salt=rng.choice(["", "", "s"]),
                priority=rng.randrange(3),
                deadline_s=clock.now_s + rng.choice([0.5, 50.0]),
                ttft_target_s=rng.choice([None, 0.1, 2.0]),
            )
            add_request(engine, one)
            live.append(one.request_id)
        if live and rng.random() < 0.1:
            engine.abort(rng.choice(live))
        step(engine, {})
    while engine.has_work:
        step(engine, {})
    load = engine.load()
    assert load.preemptions_total
    assert load.imported_pages_total
    return hashlib.sha256(b"".join(executor.uploads)).hexdigest()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_two_copies_send_their_devices_the_same(policy: str):
    assert digest(policy) == digest(policy)


def test_processes_that_hash_strings_differently_send_their_devices_the_same():
    """Breaks if anything is decided in the order of a set of names."""
    code = (
        "from tests.engine.test_replicas import digest\n"
        "for policy in ('fcfs', 'priority', 'fair', 'deadline'): print(digest(policy))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (run.communicate()[0] for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert first == second
    assert len(set(first.split())) == 4

"""What is planned is what is built: pages, on one device and on eight.

Breaks when plan and engine divide the memory in different ways: a plan that promises pages which
the engine does not get is worth nothing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.tiny_checkpoints import random_tensors, tiny_config, write_huggingface


@pytest.mark.parametrize(
    ("num_devices", "host_kv_bytes"),
    [
        pytest.param(1, 0, marks=pytest.mark.full),
        pytest.param(1, 1_000_000, marks=pytest.mark.full),
        (8, 1_000_000),
    ],
)
def test_the_engine_gets_the_pages_that_were_planned(
    tmp_path: Path, num_devices: int, host_kv_bytes: int
) -> None:
    """Three kv heads: over eight devices they are copied, and so a page is larger than a share."""
    config = tiny_config(num_q_heads=9, num_kv_heads=3)
    folder = write_huggingface(tmp_path / "tiny", config, random_tensors(config))
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.engine.plan_and_build",
            str(folder),
            "20.5",
            str(host_kv_bytes),
            str(tmp_path / "cache"),
        ],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {
        "kinds": ["step", "export", "import"] if host_kv_bytes else ["step"],
        "planned": 20,
        "built": 20,
        "plenty": 2 * 256 // 16 + 1,
        "reason": "",
        "attention": "reference",
    }

"""The real compilers of TPUs and GPUs, from the environment that `make plan-env` makes.

Breaks when a compiler is not found or looks for its chip, when its text is read wrongly, or when a
chip's numbers are not those that its own compiler has.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from octavo.configs.chips import CHIPS, GPU_MEMORY_SHARE

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "plan-venv" / "bin" / "python"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no .cache/plan-venv: make plan-env"),
]

GPUS = [chip for chip in CHIPS.values() if chip.platform == "gpu"]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 65536,
}


def run_python(tmp_path: Path, *arguments: str) -> str:
    done = subprocess.run(
        [PYTHON, *arguments],
        env={**os.environ, "OCTAVO_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each kind of compiler says of a small model."""
    return plan(tmp_path_factory.mktemp("tiny"), "--chips=v5e-8,h100-1,a100-1", "--max_num_seqs=8")


def plan(folder: Path, *arguments: str, **changes: int) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    said = run_python(
        folder,
        *("-m", "octavo.server", "plan", f"--model={folder}", "--json", "--page_size=64"),
        *("--prefill_chunk_tokens=16", *arguments),  # the last of a flag counts
    )
    return {chip["chip"]: chip for chip in json.loads(said.splitlines()[-1])["chips"]}


@pytest.mark.parametrize("name", ["v5e-8", "h100-1", "a100-1"])
def test_the_real_steps_compile(plans: dict[str, Any], name: str) -> None:
    chip = plans[name]
    assert (chip["reason"], chip["ok"]) == ("", True)
    assert chip["attention"] == CHIPS[name.partition("-")[0]].platform
    assert len(chip["executables"]) == 3
    assert all(step["temporary_bytes"] > 0 for step in chip["executables"])


def test_a_pool_that_fits_vmem_stays_in_hbm(tmp_path: Path) -> None:
    """XLA moves small arrays to VMEM and back; of 129 pages it did so in every layer and step."""
    chips = plan(tmp_path, "--chips=v6e-1,v5e-1", "--max_num_seqs=2", "--num_pages=129")
    for chip in chips.values():
        assert (chip["attention"], chip["reason"]) == ("tpu", "")


@pytest.mark.parametrize(
    ("flag_file", "chips"), [("tpu.flags", "v5e-1,v6e-8"), ("gpu.flags", "a100-1,h100-1")]
)
def test_the_sizes_that_we_recommend_compile(tmp_path: Path, flag_file: str, chips: str) -> None:
    """With a large vocabulary, of which a gather takes every row into VMEM.

    And with pages that move to the host: of several in one gather or scatter, XLA for TPUs copies
    the pool.
    """
    flags = f"--flagfile={ROOT / 'configs' / flag_file}"
    arguments = (flags, f"--chips={chips}", f"--host_kv_bytes={2**30}")
    found = plan(tmp_path, *arguments, vocab_size=128_256, num_hidden_layers=1)
    for chip in found.values():
        assert chip["reason"] == ""


def test_devices_sum_twice_a_layer_and_once_over_the_vocabulary(plans: dict[str, Any]) -> None:
    for step in plans["v5e-8"]["executables"]:
        sums = [each["count"] for each in step["collectives"] if each["kind"] == "all-reduce"]
        assert sum(sums) == 2 * TINY["num_hidden_layers"] + 1
    assert plans["h100-1"]["executables"][0]["collectives"] == []


@pytest.mark.parametrize(("name", "architecture"), [("h100-1", "sm_90a"), ("a100-1", "sm_80")])
def test_ptxas_tells_of_every_kernel(plans: dict[str, Any], name: str, architecture: str) -> None:
    """XLA's own and ours; those of attention have names of their own."""
    kernels = plans[name]["kernels"]
    assert {kernel["architecture"] for kernel in kernels} == {architecture}
    assert any("fusion" in kernel["name"] for kernel in kernels)
    assert [kernel for kernel in kernels if kernel["spill_bytes"]] == []


def test_a_gpu_is_what_its_compiler_takes_it_for(tmp_path: Path) -> None:
    """A description of another GPU than the one that is meant would plan for that."""
    code = (
        "import json, re, sys\n"
        "from octavo.engine.aot_devices import gpu_target\n"
        "for name in sys.argv[1:]:\n"
        "    text = gpu_target(name)\n"
        "    found = {key: re.search(rf'{key}: \"?([\\w.]+)', text)[1] for key in\n"
        "             ('memory_bandwidth', 'device_memory_size')}\n"
        "    print(json.dumps(found))\n"
    )
    lines = run_python(tmp_path, "-c", code, *(chip.target for chip in GPUS)).splitlines()
    assert len(lines) == len(GPUS)
    for chip, line in zip(GPUS, lines, strict=True):
        found = json.loads(line)
        assert chip.bytes_per_s == float(found["memory_bandwidth"]), chip.name
        assert chip.memory_bytes == int(int(found["device_memory_size"]) * GPU_MEMORY_SHARE)

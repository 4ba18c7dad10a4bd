"""Which backend attends: the platform's kernels where they can, or the reference and why."""

from types import SimpleNamespace
from typing import Any

import pytest
from jax._src import tpu_info  # how a name becomes a chip is not public

from octavo.pallas_kernels import tpu_budget
from octavo.pallas_kernels.backend import AttentionShape, KVShape, UnsupportedShape
from octavo.pallas_kernels.choice import choose

pytestmark = pytest.mark.usefixtures("types_unchecked")  # devices that are not there

CPU: Any = SimpleNamespace(platform="cpu")
TPU: Any = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
GPU: Any = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
ANOTHER_MAKER: Any = SimpleNamespace(platform="gpu", compute_capability="gfx942", core_count=304)


def shape(dtype: str = "bfloat16", head_dim: int = 128) -> AttentionShape:
    return AttentionShape(
        kv=KVShape(kv_heads=8, head_dim=head_dim, page_size=64, dtype=dtype),
        q_heads=32,
        rows=64,
        chunk=256,
        segments=8,
        pages_per_seq=128,
    )


@pytest.mark.parametrize(("device", "name"), [(CPU, "reference"), (TPU, "tpu"), (GPU, "gpu")])
def test_auto_is_the_platform_s_own(device: Any, name: str) -> None:
    choice = choose("auto", device, shape())
    assert (choice.backend.name, choice.reason) == (name, "")


@pytest.mark.parametrize("device", [TPU, GPU])
def test_auto_falls_back_and_says_why(device: Any) -> None:
    choice = choose("auto", device, shape(dtype="float32"))
    assert choice.backend.name == "reference"
    assert "float32" in choice.reason
    assert "bfloat16" in choice.reason


def test_a_gpu_of_another_maker_gets_the_reference() -> None:
    """Fails if what JAX calls a GPU is taken for one that CUDA numbers."""
    choice = choose("auto", ANOTHER_MAKER, shape())
    assert choice.backend.name == "reference"
    assert choice.reason.startswith("compute_capability 0: must be in [80, 90, 100]")


# As libtpu and JAX name the chips that this JAX knows, and one that is to come.
OLD_TPUS = ["TPU v2", "TPU v3", "TPU v4 lite", "TPU v4"]
TPUS = ["TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x", "TPU8i"]


@pytest.mark.parametrize("kind", OLD_TPUS)
def test_a_tpu_without_the_vmem_gets_the_reference_or_an_error(kind: str) -> None:
    """Fails if the kernels are compiled for it: XLA then runs out of VMEM, and the server stops."""
    device: Any = SimpleNamespace(platform="tpu", device_kind=kind)
    choice = choose("auto", device, shape())
    assert choice.backend.name == "reference"
    assert choice.reason == f"device_kind {kind}: must be TPU v5 or newer, for 32 MiB of VMEM"
    with pytest.raises(UnsupportedShape, match=f"attention is 'tpu'.*device_kind {kind}: "):
        choose("tpu", device, shape())


@pytest.mark.parametrize("kind", [*TPUS, "TPU10x", "a TPU of no known name"])
def test_every_other_tpu_runs_the_kernels(kind: str) -> None:
    device: Any = SimpleNamespace(platform="tpu", device_kind=kind)
    choice = choose("auto", device, shape())
    assert (choice.backend.name, choice.reason) == ("tpu", "")


@pytest.mark.parametrize("kind", [*OLD_TPUS, *TPUS])
def test_names_of_tpus_are_those_of_jax(kind: str) -> None:
    """Fails if a kind is misspelt, so that an old chip counts as new."""
    version = tpu_info.chip_version_from_device_kind(kind)
    assert version is not None
    info = tpu_info.get_tpu_info_for_chip(version, 1)
    assert (info.vmem_capacity_bytes < tpu_budget.VMEM_LIMIT_BYTES) == (kind in OLD_TPUS)


@pytest.mark.parametrize("device", [CPU, TPU, GPU, ANOTHER_MAKER])
def test_the_reference_runs_everywhere_and_needs_no_reason(device: Any) -> None:
    choice = choose("reference", device, shape(dtype="float32"))
    assert (choice.backend.name, choice.reason) == ("reference", "")


@pytest.mark.parametrize(("name", "device"), [("tpu", TPU), ("gpu", GPU)])
def test_what_was_asked_for_by_name_is_that_or_an_error(name: Any, device: Any) -> None:
    assert choose(name, device, shape()).backend.name == name
    with pytest.raises(UnsupportedShape, match=f"attention is '{name}'.*head_dim 1000"):
        choose(name, device, shape(head_dim=1000))


@pytest.mark.parametrize(("name", "device"), [("tpu", GPU), ("gpu", TPU), ("gpu", CPU)])
def test_kernels_of_another_platform_are_refused(name: Any, device: Any) -> None:
    with pytest.raises(ValueError, match=rf"attention is '{name}'; .*platform, {device.platform}"):
        choose(name, device, shape())

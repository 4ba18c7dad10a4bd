"""Real engines: a tiny random model, and the default model, each built as rarely as possible."""

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
import pytest

from octavo.configs.engine_config import DType, EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.compilation import use_persistent_cache
from octavo.engine.engine import Engine
from octavo.engine.guided_masks import GuideCompiler
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from octavo.models.decoder import ParameterSpec, declared_parameters
from octavo.models.fetch import default_cache_dir
from octavo.pallas_kernels.backend import AttentionBackend
from tests.models.numpy_decoder import NumpyDecoder
from tests.models.tiny_checkpoints import random_tensors, tiny_config, write_huggingface


@pytest.fixture(scope="session")
def compilation_cache() -> None:
    """Executables are kept beside the model, so that a second run of the tests hardly compiles."""
    use_persistent_cache(default_cache_dir() / "compiled-by-tests")


def ignore_progress(stage: str, done: int, total: int) -> None:
    pass


def on_one_device(_: ParameterSpec) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


@dataclass(frozen=True)
class Model:
    """A checkpoint to build engines from, and the same parameters in NumPy."""

    checkpoint: Checkpoint

    def build(
        self,
        config: EngineConfig,
        guides: GuideCompiler | None = None,
        backend: AttentionBackend | None = None,
    ) -> Engine:
        return build_engine(
            self.checkpoint,
            config,
            eos_token_ids=self.checkpoint.eos_token_ids,
            clock=time.monotonic,
            on_progress=ignore_progress,
            guides=guides,
            backend=backend,
        ).engine

    @cached_property
    def decoder(self) -> NumpyDecoder:
        """In float32."""
        config = self.checkpoint.config
        declared = declared_parameters(config, "float32")
        loaded = self.checkpoint.load(declared, on_one_device)
        return NumpyDecoder(config, {path: np.asarray(value) for path, value in loaded.items()})


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, compilation_cache: None) -> Model:
    """Two layers, 320 tokens, random: its outputs are noise that depends on every input."""
    config = tiny_config(max_position=1024)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_huggingface(folder, config, random_tensors(config), dtype=np.float32)
    return Model(open_checkpoint(folder))


# Primes: no size is a whole number of any other.
TINY_ENGINE = EngineConfig(
    dtype="float32",
    max_num_seqs=7,
    prefill_chunk_tokens=37,
    page_size=5,
    num_pages=67,
    max_model_len=211,
    max_stop_ids=5,
)


@pytest.fixture(scope="session")
def tiny_engine(tiny_model: Model) -> Engine:
    """Shared: every test leaves it idle, as it found it."""
    return tiny_model.build(TINY_ENGINE)


@pytest.fixture(scope="session")
def default_model(default_model_path: Path, compilation_cache: None) -> Model:
    """SmolLM2, the real one."""
    return Model(open_checkpoint(default_model_path))


def _default_engine(model: Model, dtype: DType) -> Engine:
    """Two executables, as few as there can be."""
    return model.build(
        EngineConfig(dtype=dtype, max_num_seqs=2, prefill_chunk_tokens=16, num_pages=64)
    )


@pytest.fixture(scope="session")
def default_engine_float32(default_model: Model) -> Engine:
    return _default_engine(default_model, "float32")


@pytest.fixture(scope="session")
def default_engine_bfloat16(default_model: Model) -> Engine:
    return _default_engine(default_model, "bfloat16")

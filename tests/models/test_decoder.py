"""The decoder against a Llama in NumPy, and the strictness of its parameters."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.configs.model_config import ModelConfig, RopeScaling
from octavo.models.decoder import Decoder, declared_parameters, decoder_from_parameters
from octavo.pallas_kernels.backend import KVShape
from octavo.pallas_kernels.chunk_tokens import Segments
from octavo.pallas_kernels.paged_attention import paged_batch
from octavo.pallas_kernels.reference_backend import ReferenceBackend

from .numpy_decoder import NumpyDecoder
from .tiny_checkpoints import decoder_parameters, random_tensors, tiny_config

PAGE_SIZE = 8
NUM_PAGES = 12


def parameters(config: ModelConfig, dtype: str = "float32") -> dict[str, jax.Array]:
    declared = declared_parameters(config, dtype)
    values = decoder_parameters(config, random_tensors(config))
    return {path: jnp.asarray(value, declared[path].dtype) for path, value in values.items()}


def build(config: ModelConfig) -> Decoder:
    return decoder_from_parameters(config, "float32", parameters(config))


def forward(decoder: Decoder, token_ids: list[int], chunks: list[int]) -> np.ndarray:
    """Logits at every position of one request: its prompt in chunks, the rest token by token."""
    config = decoder.config
    backend = ReferenceBackend()
    shape = KVShape(
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=PAGE_SIZE,
        dtype="float32",
    )
    kv = [backend.allocate(shape, NUM_PAGES) for _ in range(config.num_layers)]
    table = jnp.array([[7, 3, 11, 1, 5, 2]], jnp.int32)
    logits: list[np.ndarray] = []
    at = 0
    while at < len(token_ids):
        if chunks:
            length, chunk = chunks.pop(0), 16
            segments = Segments(table, jnp.array([at + length]), jnp.array([length]))
            row_lens = jnp.zeros(1, jnp.int32)
        else:
            length, chunk, segments = 1, 0, None
            row_lens = jnp.array([at + 1])
        fresh = token_ids[at : at + length]
        # The decode row comes first; in a step with a chunk it is padding.
        tokens = [0, *fresh, *[0] * (chunk - length)] if chunk else fresh
        batch = paged_batch(
            backend,
            table,
            row_lens,
            segments,
            chunk=chunk,
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
        )
        hidden, kv = decoder(jnp.array(tokens, jnp.int32), kv, batch)
        first = 1 if chunk else 0
        logits.append(np.asarray(decoder.logits(hidden[first : first + length])))
        at += length
    assert not any(layer.k[0].any() or layer.v[0].any() for layer in kv), "page 0 was written"
    return np.concatenate(logits)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        tiny_config(tie_word_embeddings=False, num_kv_heads=1),
        tiny_config(num_kv_heads=4, head_dim=16, rms_norm_eps=1e-2),
        tiny_config(
            rope_theta=100.0,
            rope_scaling=RopeScaling(
                factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position=64
            ),
        ),
    ],
    ids=["tied", "own head, one kv head", "as many kv heads as heads", "scaled rope"],
)
def test_logits_are_those_of_a_llama_in_numpy(config: ModelConfig):
    token_ids = np.random.default_rng(1).integers(0, config.vocab_size, 40).tolist()
    reference = NumpyDecoder(config, decoder_parameters(config, random_tensors(config)))
    expected = reference.logits(reference.hidden(token_ids, reference.empty_cache()))
    decoder = build(config)
    for chunks in ([16, 16, 5], [1, 15, 3]):
        np.testing.assert_allclose(forward(decoder, token_ids, chunks), expected, atol=2e-4)


def test_parameters_are_declared_once_with_shape_dtype_and_axes():
    config = tiny_config(tie_word_embeddings=False)
    declared = declared_parameters(config, "bfloat16")
    layer = {
        "attention_norm",
        "qkv",
        "attention_output",
        "mlp_norm",
        "gate_up",
        "down",
    }
    assert declared.keys() == {
        "embedding",
        "final_norm",
        "head",
        *(f"layers.{index}.{name}" for index in range(2) for name in layer),
    }
    for path, spec in declared.items():
        is_norm = path.endswith("norm")
        assert spec.dtype == (jnp.float32 if is_norm else jnp.bfloat16), path
        assert len(spec.axes) == len(spec.shape), path
        assert any(spec.axes) != is_norm, f"{path} should be split over devices, unless a norm"
    # 4 query heads on 2 kv heads: each kv head has 2 of them, its key and its value.
    assert declared["layers.1.qkv"].shape == (2, 4, 8, 64)
    assert "head" not in declared_parameters(tiny_config(), "bfloat16")


def test_declaring_allocates_nothing():
    """A model that no machine could hold."""
    huge = tiny_config(hidden_size=2**20, intermediate_size=2**22, vocab_size=2**20)
    assert declared_parameters(huge, "float32")["layers.0.down"].shape == (2**20, 2**22)


MISFITS: dict[str, Callable[[dict[str, jax.Array]], object]] = {
    "parameter layers.1.qkv is missing": lambda p: p.pop("layers.1.qkv"),
    "parameter final_norm is missing": lambda p: p.pop("final_norm"),
    "parameter head is not declared": lambda p: p.update(head=p["embedding"]),
    "parameter layers.2.qkv is not declared": lambda p: p.update(
        {"layers.2.qkv": p["layers.1.qkv"]}
    ),
    "parameter layers.0.down is float32[96, 64]; the decoder declares float32[64, 96]": (
        lambda p: p.update({"layers.0.down": p["layers.0.down"].T})
    ),
    "parameter embedding is bfloat16[320, 64]; the decoder declares float32[320, 64]": (
        lambda p: p.update(embedding=p["embedding"].astype(jnp.bfloat16))
    ),
}


@pytest.mark.parametrize("message", MISFITS)
def test_parameters_that_do_not_fit_are_refused_by_name(message: str):
    held = parameters(tiny_config())
    MISFITS[message](held)
    with pytest.raises(ValueError, match=re.escape(message)):
        decoder_from_parameters(tiny_config(), "float32", held)

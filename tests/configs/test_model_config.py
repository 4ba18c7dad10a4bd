"""ModelConfig and RopeScaling: every refusal names the field, its value and the bound."""

import dataclasses
import math
from typing import Any

import pytest

from octavo.configs.model_config import ModelConfig, RopeScaling

# The suite checks annotations at run time, and would refuse a wrong type before the record does.
pytestmark = pytest.mark.usefixtures("types_unchecked")

LEGAL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position": 256,
}
# Llama 3.1's own values.
LEGAL_SCALING: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position": 8192,
}
SIZES = [name for name, value in LEGAL.items() if isinstance(value, int)]
NOT_SIZES = [0, -1, 2**31, math.nan, math.inf, 2.0, True, None, "2"]
NOT_FLOATS = [math.nan, math.inf, -math.inf, -1.0, 0.0]


def refusal(record: type, **fields: Any) -> str:
    with pytest.raises(ValueError, match="must") as caught:
        record(**fields)
    return str(caught.value)


def test_a_real_architecture_is_legal() -> None:
    config = ModelConfig(**LEGAL, rope_scaling=RopeScaling(**LEGAL_SCALING))
    assert (config.num_q_heads, config.tie_word_embeddings) == (4, False)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", NOT_SIZES)
def test_sizes_are_positive_whole_numbers(name: str, value: Any) -> None:
    message = refusal(ModelConfig, **LEGAL | {name: value})
    assert message == f"model {name} is {value!r}; it must be a whole number in [1, 2^31)"


def test_a_damaged_file_cannot_ask_for_a_billion_layers() -> None:
    assert ModelConfig(**LEGAL | {"num_layers": 1024}).num_layers == 1024
    message = refusal(ModelConfig, **LEGAL | {"num_layers": 1025})
    assert message == "model num_layers is 1025; it must be at most 1024"


def test_what_is_nearly_true_is_refused() -> None:
    message = refusal(ModelConfig, **LEGAL, tie_word_embeddings="no")
    assert message == "model tie_word_embeddings is 'no'; it must be True or False"


@pytest.mark.parametrize(
    ("name", "bound"), [("rope_theta", "[1.0, 1"), ("rms_norm_eps", "[1e-12, ")]
)
@pytest.mark.parametrize("value", NOT_FLOATS)
def test_constants_are_finite_and_in_range(name: str, bound: str, value: float) -> None:
    """NaN passes `value < low or value > high`."""
    message = refusal(ModelConfig, **LEGAL, **{name: value})
    assert message.startswith(f"model {name} is {value}; it must be in {bound}")


def test_query_heads_share_key_heads_evenly() -> None:
    message = refusal(ModelConfig, **LEGAL | {"num_q_heads": 6, "num_kv_heads": 4})
    assert message == "model num_q_heads is 6; it must be a multiple of num_kv_heads, 4"


def test_rotary_pairs_need_an_even_head() -> None:
    message = refusal(ModelConfig, **LEGAL | {"head_dim": 7})
    assert message == "model head_dim is 7; it must be even for the rotary embedding"


@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor"])
@pytest.mark.parametrize("value", NOT_FLOATS)
def test_scaling_factors_are_finite_and_in_range(name: str, value: float) -> None:
    message = refusal(RopeScaling, **LEGAL_SCALING | {name: value})
    assert message.startswith(f"rope_scaling {name} is {value}; it must be in [")


@pytest.mark.parametrize("value", NOT_SIZES)
def test_scaling_position_is_a_positive_whole_number(value: Any) -> None:
    message = refusal(RopeScaling, **LEGAL_SCALING | {"original_max_position": value})
    assert message.startswith(f"rope_scaling original_max_position is {value!r}; it must be")


def test_scaling_needs_a_band_between_its_frequencies() -> None:
    """Equal factors divide by zero in the interpolation."""
    message = refusal(RopeScaling, **LEGAL_SCALING | {"high_freq_factor": 1.0})
    assert message == "rope_scaling high_freq_factor is 1.0; it must exceed low_freq_factor, 1.0"


def test_every_number_is_in_a_table() -> None:
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields - set(LEGAL) == {
        "rope_theta",
        "rope_scaling",
        "rms_norm_eps",
        "tie_word_embeddings",
    }

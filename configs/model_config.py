"""ModelConfig: the architecture of one decoder-only model, whatever file format it came from."""

import dataclasses
from dataclasses import dataclass

MAX_LAYERS = 1024  # far beyond any model; a damaged file may say a billion, and each costs memory


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretch of the rotary embedding.

    Source: Hugging Face transformers, `rope_type: llama3`; Llama 3.1 model card.

    Attributes:
      factor: How much the low frequencies are slowed down.
      low_freq_factor: Wavelengths above original_max_position / low_freq_factor get the whole
        factor.
      high_freq_factor: Wavelengths below original_max_position / high_freq_factor are left alone.
      original_max_position: Context length of the unscaled model, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and the bound."""
        _check_int("rope_scaling original_max_position", self.original_max_position)
        _check_float("rope_scaling factor", self.factor, 1.0, 1e6)
        _check_float("rope_scaling low_freq_factor", self.low_freq_factor, 1e-6, 1e6)
        _check_float("rope_scaling high_freq_factor", self.high_freq_factor, 1e-6, 1e6)
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling high_freq_factor is {self.high_freq_factor}; it must exceed "
                f"low_freq_factor, {self.low_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder of the Llama family.

    Attributes:
      vocab_size: Rows of the embedding; every valid token id is in [0, vocab_size).
      hidden_size: Width D of the residual stream.
      intermediate_size: Width F of the gated MLP.
      num_layers: Decoder layers.
      num_q_heads: Query heads N.
      num_kv_heads: Key and value heads K; divides num_q_heads.
      head_dim: Width H of one head.
      max_position: Longest context the model was trained for, in tokens.
      rope_theta: Base of the rotary embedding.
      rope_scaling: Stretch of the rotary embedding, or None.
      rms_norm_eps: Epsilon under the root of RMSNorm.
      tie_word_embeddings: The output head is the embedding; no separate tensor exists.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and the bound."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                _check_int(f"model {field.name}", value)
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"model {field.name} is {value!r}; it must be True or False")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(
                f"model num_layers is {self.num_layers}; it must be at most {MAX_LAYERS}"
            )
        _check_float("model rope_theta", self.rope_theta, 1.0, 1e12)
        _check_float("model rms_norm_eps", self.rms_norm_eps, 1e-12, 1.0)
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"model num_q_heads is {self.num_q_heads}; it must be a multiple of "
                f"num_kv_heads, {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model head_dim is {self.head_dim}; it must be even for the rotary embedding"
            )


def _check_int(name: str, value: int) -> None:
    # bool is an int to Python, and a size of True is a mistake.
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError(f"{name} is {value!r}; it must be a whole number in [1, 2^31)")


def _check_float(name: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails.
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be in [{low}, {high}]")

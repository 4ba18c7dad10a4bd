"""ModelConfig: the architecture of one decoder-only model, whatever file format it came from."""

import dataclasses
from dataclasses import dataclass


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


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder of the Llama family.

    Attributes:
      name: What clients call the model.
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

    name: str
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
            if field.type is int and value < 1:
                raise ValueError(f"model {field.name} is {value}; it must be at least 1")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"model num_q_heads is {self.num_q_heads}; it must be a multiple of "
                f"num_kv_heads, {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model head_dim is {self.head_dim}; rotary embedding needs it even")

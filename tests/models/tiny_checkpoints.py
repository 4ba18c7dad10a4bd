"""Builders of tiny random checkpoints in every format, all from the same parameters.

They write the formats as their own tools do, with code of their own: nothing here uses the loaders
that it serves to test.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.configs.model_config import ModelConfig

Arrays = dict[str, np.ndarray]

GGUF_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)

EOS_TOKEN = "<|im_end|>"
BOS_TOKEN = "<|im_start|>"
# 256 single bytes, one merge, the control tokens; the rest of the vocabulary is filler.
BOS_TOKEN_ID = 257
EOS_TOKEN_ID = 258
VOCAB_SIZE = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers of four query heads on two kv heads; every dimension differs where it may."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position": 256,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return ModelConfig(**(values | changes))


def random_tensors(config: ModelConfig, seed: int = 0) -> Arrays:
    """Float32 tensors by Hugging Face's names, exact in bfloat16 so that no format rounds them."""
    rng = np.random.default_rng(seed)
    hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_q_heads * head_dim, config.num_kv_heads * head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        values = rng.normal(0, columns**-0.5, (rows, columns))
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)

    def norm() -> np.ndarray:
        return rng.uniform(0.5, 1.5, hidden).astype(ml_dtypes.bfloat16).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden),
        "model.norm.weight": norm(),
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = matrix(config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": norm(),
            layer + "self_attn.q_proj.weight": matrix(q_rows, hidden),
            layer + "self_attn.k_proj.weight": matrix(kv_rows, hidden),
            layer + "self_attn.v_proj.weight": matrix(kv_rows, hidden),
            layer + "self_attn.o_proj.weight": matrix(hidden, q_rows),
            layer + "post_attention_layernorm.weight": norm(),
            layer + "mlp.gate_proj.weight": matrix(ffn, hidden),
            layer + "mlp.up_proj.weight": matrix(ffn, hidden),
            layer + "mlp.down_proj.weight": matrix(hidden, ffn),
        }
    return tensors


def decoder_parameters(config: ModelConfig, tensors: Arrays) -> Arrays:
    """The decoder's parameters that Hugging Face's tensors make up, by path; float32."""
    head_dim, kv_heads = config.head_dim, config.num_kv_heads
    group = config.num_q_heads // kv_heads
    parameters = {
        "embedding": tensors["model.embed_tokens.weight"],
        "final_norm": tensors["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        parameters["head"] = tensors["lm_head.weight"]
    for i in range(config.num_layers):
        source, target = f"model.layers.{i}.", f"layers.{i}."
        q, k, v = (
            tensors[f"{source}self_attn.{name}_proj.weight"].reshape(
                -1, head_dim, config.hidden_size
            )
            for name in "qkv"
        )
        qkv = [
            head for j in range(kv_heads) for head in (*q[j * group : (j + 1) * group], k[j], v[j])
        ]
        parameters |= {
            target + "attention_norm": tensors[source + "input_layernorm.weight"],
            target + "qkv": np.stack(qkv).reshape(kv_heads, group + 2, head_dim, -1),
            target + "attention_output": tensors[source + "self_attn.o_proj.weight"],
            target + "mlp_norm": tensors[source + "post_attention_layernorm.weight"],
            target + "gate_up": np.stack(
                [tensors[source + "mlp.gate_proj.weight"], tensors[source + "mlp.up_proj.weight"]]
            ),
            target + "down": tensors[source + "mlp.down_proj.weight"],
        }
    return parameters


def huggingface_config(config: ModelConfig) -> dict[str, Any]:
    """config.json as transformers 4 writes it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "bfloat16",
    }


def write_huggingface(
    folder: Path,
    config: ModelConfig,
    tensors: Arrays,
    *,
    dtype: Any = ml_dtypes.bfloat16,
    num_files: int = 1,
    changes: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """A Hugging Face folder with tokenizer.

    Args:
      folder: Where; is made.
      config: The architecture.
      tensors: By Hugging Face's names.
      dtype: In which they are stored.
      num_files: With more than one, an index says which file holds which tensor.
      changes: Keys of config.json to set to other values.
      generation_config: Content of generation_config.json; None: no such file.
    """
    folder.mkdir(parents=True)
    description = huggingface_config(config) | (changes or {})
    (folder / "config.json").write_text(json.dumps(description))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    stored = {name: np.ascontiguousarray(value.astype(dtype)) for name, value in tensors.items()}
    if num_files == 1:
        save_file(stored, folder / "model.safetensors")
    else:
        weight_map: dict[str, str] = {}
        for i in range(num_files):
            file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
            part = {name: stored[name] for name in list(stored)[i::num_files]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_huggingface_tokenizer(folder)
    return folder


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Arrays,
    *,
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    changes: dict[str, Any] | None = None,
    extra: Arrays | None = None,
) -> Path:
    """A GGUF file with tokenizer, as llama.cpp's converter writes it.

    Args:
      path: Where.
      config: The architecture.
      tensors: By Hugging Face's names.
      matrix_type: In which the matrices are stored; norms are float32.
      changes: Metadata to set to other values; None leaves the key out.
      extra: More float32 tensors, by GGUF's names.
    """
    writer = gguf.GGUFWriter(path, "llama")
    metadata: dict[str, Any] = {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_position,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_q_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        "llama.vocab_size": config.vocab_size,
    }
    for key, value in (metadata | gguf_tokenizer() | (changes or {})).items():
        if value is not None and key == "general.architecture":
            writer.kv_data[0].pop(key)
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            # The library guesses signed integers; llama.cpp writes unsigned ones.
            kind = gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind
            writer.add_key_value(key, value, kind)
    for name, value in tensors.items():
        if value.ndim == 1:
            writer.add_tensor(gguf_name(name), value)
            continue
        data = gguf.quantize(interleave(name, value, config), matrix_type)
        writer.add_tensor(gguf_name(name), data, raw_dtype=matrix_type)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor, from the table that llama.cpp's converter uses."""
    found = GGUF_NAMES.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None
    return found


def interleave(name: str, value: np.ndarray, config: ModelConfig) -> np.ndarray:
    """What llama.cpp's converter does to query and key weights (LlamaModel.permute)."""
    heads = {"q_proj.weight": config.num_q_heads, "k_proj.weight": config.num_kv_heads}
    num_heads = heads.get(".".join(name.split(".")[-2:]))
    if num_heads is None:
        return value
    halves = value.reshape(num_heads, 2, value.shape[0] // num_heads // 2, value.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable}
    spelled |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


def vocabulary() -> list[str]:
    """All spellings in id order."""
    tokens = [*byte_alphabet(), "Ġt", BOS_TOKEN, EOS_TOKEN]
    return tokens + [f"<unused{i}>" for i in range(VOCAB_SIZE - len(tokens))]


def gguf_tokenizer() -> dict[str, Any]:
    """The tokenizer as GGUF metadata."""
    normal, control, unused = (
        int(kind) for kind in (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED)
    )
    num_normal = BOS_TOKEN_ID
    num_unused = VOCAB_SIZE - num_normal - 2
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary(),
        "tokenizer.ggml.token_type": [normal] * num_normal + [control] * 2 + [unused] * num_unused,
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.bos_token_id": BOS_TOKEN_ID,
        "tokenizer.ggml.eos_token_id": EOS_TOKEN_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_unigram_tokenizer(
    folder: Path, control: str, letters: str, *, has_unknown: bool = True
) -> None:
    """A vocabulary of letters that spells its one control token like a word: Unigram finds it."""
    pieces = [(control, 0.0), ("<unk>", 0.0), *((letter, -3.0) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1 if has_unknown else None))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens([control])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": control}))


def write_huggingface_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokens = vocabulary()
    normal = {token: i for i, token in enumerate(tokens[:BOS_TOKEN_ID])}
    tokenizer = Tokenizer(models.BPE(vocab=normal, merges=[("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[BOS_TOKEN_ID:])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)

"""Tiny vocabularies of each kind, trained in a moment: the real libraries, nothing faked."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it says hello to the world.",
    "Hello world! Hello again, world; how are you today? I am fine, thank you very much.",
    "im_start im_end system user assistant <|im <| |> </s> <s> tool_call end of text",
    "naïve café — “quotes” 日本語テキスト emoji 👩‍👩‍👧‍👦 0123456789 3.14159",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|user|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as of a GPT-2-like model: byte-level BPE, chat template, no BOS added."""
    folder = tmp_path_factory.mktemp("byte_level")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    library.add_tokens([tokenizers.AddedToken("é!", normalized=False)])
    library.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def metaspace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as of a Llama-like model converted to tokenizer.json: a space before the first text
    alone, byte fallback, BOS added by the post-processor."""
    folder = tmp_path_factory.mktemp("metaspace")
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    description = json.loads(library.to_str())
    vocabulary = description["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    library = tokenizers.Tokenizer.from_str(json.dumps(description))
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def unigram_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose vocabulary spells its control tokens like words: Unigram finds them."""
    folder = tmp_path_factory.mktemp("unigram")
    library = tokenizers.Tokenizer(models.Unigram())
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as of Llama 2: a SentencePiece BPE model with byte fallback."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n", "▁▁", "<think>"],
        control_symbols=["<|im_start|>", "<|im_end|>"],
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    config = {"bos_token": "<s>", "eos_token": "</s>", "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + CHAT_TEMPLATE)
    return folder

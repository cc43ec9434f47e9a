"""Tokenizer and generation files as published models have them, small and without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = ["the quick brown fox jumps over the lazy dog " * 20]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
)


def byte_level(directory: Path) -> None:
    """As Llama 3 and Qwen: byte-level BPE, the chat template in its own file, and several tokens that end a text."""
    special = ["<|begin|>", "<|end|>", "<|eot|>", "<|pad|>", "<|tool|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "<|end|>", "special": True}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"bos_token": "<|begin|>", "eos_token": end, "pad_token": "<|pad|>"},
        "additional_special_tokens": ["<|tool|>"],
        "model_max_length": 4096,
    }
    write(directory / "tokenizer_config.json", settings)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tools.jinja").write_text(f"tools: {TEMPLATE}")
    generation = {"bos_token_id": 0, "eos_token_id": [2, 1], "pad_token_id": 3, "temperature": 0.6}
    write(directory / "generation_config.json", generation | {"do_sample": True})
    change_config(directory, bos_token_id=0, eos_token_id=[1, 2], pad_token_id=3)


def sentencepiece(directory: Path) -> None:
    """As Llama 2 and Mistral: BPE with byte fallback, a map of special tokens, the chat template in the settings."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=290, special_tokens=special))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "legacy": False}
    write(directory / "tokenizer_config.json", settings | {"eos_token": "</s>"})
    write(
        directory / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    )
    write(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    change_config(directory, bos_token_id=1, eos_token_id=2, pad_token_id=None)


def gpt2(directory: Path) -> None:
    """As GPT-2: vocab.json and merges.txt, without tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "Ġt", "he", "<|endoftext|>"]
    write(directory / "vocab.json", {token: number for number, token in enumerate(tokens)})
    (directory / "merges.txt").write_text("#version: 0.2\nĠ t\nh e\n")
    end = tokens.index("<|endoftext|>")
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024, **special}
    write(directory / "tokenizer_config.json", settings | {"pad_token": "<|endoftext|>"})
    change_config(directory, bos_token_id=end, eos_token_id=end)
    (directory / "generation_config.json").unlink(missing_ok=True)


KINDS: dict[str, Callable[[Path], None]] = {"llama3.2": byte_level, "mistral": sentencepiece, "gpt2": gpt2}
"""By a case of models with the same kind of tokenizer."""


def write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document))


def change_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    write(path, json.loads(path.read_bytes()) | values)

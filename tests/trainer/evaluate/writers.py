"""Tokenizers of three kinds, and models that write the tokens that a test chooses."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.trainer.huggingface.models import transformers_process

VOCAB_SIZE = 400
MAX_LENGTH = 256
EOD, TURN = "<eod>", "<|im_end|>"
TEXTS = ["the cat sat on the mat\n\nQuestion: naïve 👩‍🚀 café?\n  answer \t the end. 東京 stop </s>"] * 5


def byte_level() -> Tokenizer:
    """A tokenizer of the kind of GPT-2's."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(library, [EOD, TURN], initial_alphabet=alphabet)


def metaspace() -> Tokenizer:
    """A tokenizer with Metaspace, without bytes. It knows the characters of TEXTS only."""
    library = Tokenizer(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    alphabet = [*map(chr, range(ord("!"), ord("~") + 1))]
    return _trained(library, ["<unk>", EOD, TURN], initial_alphabet=alphabet)


def byte_fallback() -> Tokenizer:
    """A tokenizer of the kind of Llama 2's and Mistral's."""
    library = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    size = 256  # of bytes
    counts = Counter(TEXTS[0].replace(" ", "▁"))
    # The trainer would choose among equally frequent characters in another way each time.
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:30]
    limits = {"vocab_size": VOCAB_SIZE - size, "limit_alphabet": 30, "initial_alphabet": alphabet}
    trained = _trained(library, ["<unk>", EOD, TURN], **limits)
    document = json.loads(trained.to_str())
    vocabulary = document["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(size)}
    return Tokenizer.from_str(json.dumps(document))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "metaspace": metaspace,
    "byte fallback": byte_fallback,
}


def _trained(library: Tokenizer, special: list[str], **options: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        **{"vocab_size": VOCAB_SIZE, "special_tokens": special, "show_progress": False, **options}
    )
    library.train_from_iterator(TEXTS, trainer)
    return library


def save_model(directory: Path, script: Sequence[int], vocab_size: int) -> None:
    """A GPT-2 whose most likely token at position p is `script[p]`, whatever the prompt is."""
    transformers_process().submit(_save_model, directory, list(script), vocab_size).result()


def _save_model(directory: Path, script: list[int], vocab_size: int) -> None:
    import transformers

    warnings.simplefilter("ignore")
    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=len(script),
        n_embd=len(script),
        n_layer=1,
        n_head=2,
        n_inner=8,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.constant_(parameter, float("ln_" in name and name.endswith("weight")))
    model.transformer.wpe.weight.data.fill_diagonal_(1)
    positions = torch.arange(len(script) - 1)
    model.lm_head.weight.data[script[1:], positions] = 1
    model.save_pretrained(directory)

"""Write a tiny Llama with random weights, its tokenizer and a few conversations, to try sft.py without a download.

    python tiny_chat_model.py DIRECTORY

The tokenizer has one token per byte.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|pad|>"]


def main() -> None:
    """Write DIRECTORY/model and DIRECTORY/conversations.jsonl."""
    directory = Path(sys.argv[1])
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(directory / "model")
    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    lines = []
    for number in range(64):
        question = {"role": "user", "content": f"What is {number} plus {number}?"}
        answer = {"role": "assistant", "content": f"It is {2 * number}."}
        lines.append(json.dumps({"messages": [question, answer]}))
    (directory / "conversations.jsonl").write_text("\n".join(lines) + "\n")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, and tokens that begin and end messages."""
    bytes_as_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(bytes_as_text)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


if __name__ == "__main__":
    main()

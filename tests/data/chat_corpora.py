"""Chats, chat templates and small tokenizers for the tests.

Templates of models are those that TRL ships (Apache 2.0) for comparison with a tokenizer's own.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{{ bos_token }}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
"""Traits of Mistral's first templates: no generation prompt, the system message in the first user message."""

SPECIAL_TOKENS = (
    *(
        "<|endoftext|>",
        "<bos>",
        "<eos>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    *(
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|start|>",
        "<|message|>",
    ),
    *(
        "<|channel|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "[INST]",
    ),
    *(
        "[/INST]",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
    ),
    *(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<tool_call>",
        "</tool_call>",
    ),
)
"""Tokens that end a turn, and some others, of all models in the tests."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""Words of Llama 3's and Qwen's tokenizers, in which several newlines are one word."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "rain",
            "description": "Rain in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def model_template(name: str) -> str:
    """The chat template of a model, from TRL's files."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def model_templates() -> list[str]:
    """Names of all templates of TRL."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return sorted(path.stem for path in (Path(found.origin).parent / "chat_templates").glob("*.jinja"))


def chat(*turns: str, system: str | None = None, **others: Any) -> dict[str, Any]:
    """A document with the messages `turns`, of user and assistant in turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    messages += [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    return {"messages": messages, **others}


def tool_chat() -> dict[str, Any]:
    """A document in which the assistant calls a tool, with its arguments as JSON text, as in OpenAI's API."""
    call = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Oslo"}'}}
    return {
        "messages": [
            {"role": "user", "content": "Rain in Oslo?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "name": "rain", "content": "yes"},
            {"role": "assistant", "content": "Yes."},
        ],
        "tools": TOOLS,
    }


def write_tokenizer(folder: Path, template: str | None = CHATML, **settings: Any) -> Path:
    """Writes a small byte-level tokenizer.json with SPECIAL_TOKENS, and its tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL_TOKENS) + 40,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["assistant\n", "user\n\n", "system\n\n", "hello hello! Yes. The rain in Oslo."] * 3, trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    found = {"bos_token": "<bos>", "eos_token": "<eos>", **settings}
    if template is not None:
        found["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(found), encoding="utf-8")
    return folder / "tokenizer.json"


def write_chats(path: Path, documents: Sequence[Any]) -> Path:
    """Writes one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path

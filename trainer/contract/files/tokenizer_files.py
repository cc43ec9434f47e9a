"""Names of the files of a tokenizer as transformers writes them, and their special tokens."""

from __future__ import annotations

from typing import Any

TEMPLATE_FILE, SETTINGS, SPECIAL_TOKENS = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
MORE_TEMPLATES = "additional_chat_templates"
"""Directory of further templates, each NAME.jinja."""


def token_text(token: Any) -> str | None:
    """The text of a special token in a file of transformers, where it may be an object. None if it has none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None

"""The chat template of a corpus of chats: its file, and what identifies it in records. Needs only Jinja."""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

from hpcgen.config.corpus import ChatConfig
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.errors import HpcgenError
from trainer.chats.errors import ChatTemplateError
from trainer.chats.files import load_template
from trainer.chats.template import ChatTemplate


def chat_template(chat: ChatConfig, tokenizer: TokenizerConfig) -> ChatTemplate:
    """Loads the chat template of a corpus.

    Raises:
        HpcgenError: there is no template, or it is invalid.
    """
    file = chat.chat_template_file
    try:
        return load_template(
            Path(str(tokenizer.tokenizer_file)),
            Path(file) if file else None,
            name=chat.chat_template,
            date=datetime.date.fromisoformat(chat.date) if chat.date else None,
        )
    except ChatTemplateError as error:
        raise HpcgenError(error.mistakes[0]) from error


def template_identity(chat: ChatConfig, tokenizer: TokenizerConfig) -> dict[str, Any]:
    """Settings of the text of chats, apart from the tokenizer: hash of the template, its variables, and the date.

    Raises:
        HpcgenError: there is no template, or it is invalid.
    """
    template = chat_template(chat, tokenizer)
    variables = json.dumps(template.variables, sort_keys=True)
    return {
        "template": hashlib.sha256(template.source.encode()).hexdigest(),
        "variables": hashlib.sha256(variables.encode()).hexdigest(),
        "date": chat.date,
    }

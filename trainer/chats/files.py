"""Chat templates and special tokens in the files of a tokenizer."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.chats.errors import ChatTemplateError
from trainer.chats.template import ChatTemplate
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.files.tokenizer_files import (
    MORE_TEMPLATES,
    SETTINGS,
    SPECIAL_TOKENS,
    TEMPLATE_FILE,
    token_text,
)

DEFAULT = "default"
"""Name of a tokenizer's main template in transformers."""


def load_template(
    tokenizer_file: Path,
    template_file: Path | None = None,
    *,
    name: str | None = None,
    date: datetime.date | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """Loads the chat template of a tokenizer.json, or the one in `template_file`.

    The default is chat_template.jinja next to the tokenizer, else `chat_template` in its tokenizer_config.json. `name`
    chooses among several templates. `date` and `variables` are as in `ChatTemplate`.

    Raises:
        ChatTemplateError: there is no template, no such template, several without a name, or a file is invalid.
    """
    directory = tokenizer_file.parent
    settings = _read_object(directory / SETTINGS)
    place, source = template_source(directory, template_file, name)
    special = {**_read_object(directory / SPECIAL_TOKENS), **settings}
    return ChatTemplate(
        place,
        source,
        special_tokens=_special_tokens(special),
        added_tokens=_added_tokens(tokenizer_file),
        date=date,
        variables=variables,
    )


def template_source(directory: Path, template_file: Path | None, name: str | None) -> tuple[str, str]:
    """The file and the text of a chat template: `template_file`, or one of those in the tokenizer's `directory`.

    Raises:
        ChatTemplateError: there is no such template, several without a name, or a file is invalid.
    """
    if template_file is None:
        return _named_template(directory, _read_object(directory / SETTINGS), name)
    if name is not None:
        raise ChatTemplateError(
            f"the template is named twice: {name!r} and {template_file}. Keep one of them"
        )
    return str(template_file), _read_text(template_file)


def _named_template(directory: Path, settings: Mapping[str, Any], name: str | None) -> tuple[str, str]:
    """The file and the text of the template `name`."""
    found = _templates(directory, settings)
    if not found:
        raise ChatTemplateError(
            f"the tokenizer has no chat template: neither {TEMPLATE_FILE} nor chat_template in {SETTINGS}. Base models "
            "often have none; use the one of the chat model, or your own (data.corpus.chat.chat_template_file, "
            "--chat-template)",
            where=directory,
        )
    if name is None and len(found) > 1:
        raise ChatTemplateError(
            f"the tokenizer has several chat templates: {', '.join(sorted(found))}. Choose one "
            "(data.corpus.chat.chat_template)",
            where=directory,
        )
    chosen = name or next(iter(found))
    if chosen not in found:
        raise ChatTemplateError(
            f"the tokenizer has no chat template {chosen!r}. Its templates: {', '.join(sorted(found))}",
            where=directory,
        )
    return found[chosen]


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """All templates of a tokenizer: name -> file and text. Files win over tokenizer_config.json, as in transformers."""
    found: dict[str, tuple[str, str]] = {}
    in_settings = settings.get("chat_template")
    place = str(directory / SETTINGS)
    if isinstance(in_settings, str):
        found[DEFAULT] = place, in_settings
    elif isinstance(in_settings, list):
        for entry in in_settings:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                found[str(entry.get("name"))] = place, entry["template"]
    main = directory / TEMPLATE_FILE
    files = {path.stem: path for path in sorted((directory / MORE_TEMPLATES).glob("*.jinja"))}
    if main.exists():
        found, files[DEFAULT] = {}, main
    return found | {name: (str(path), _read_text(path)) for name, path in files.items()}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Variables such as bos_token: the text of each special token."""
    return {
        key: text
        for key, value in settings.items()
        if key.endswith("_token") and (text := token_text(value)) is not None
    }


def _added_tokens(tokenizer_file: Path) -> list[str]:
    added = _read_object(tokenizer_file).get("added_tokens", [])
    return [
        token["content"]
        for token in added
        if isinstance(token, dict) and isinstance(token.get("content"), str)
    ]


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    try:
        value = json.loads(read_bytes(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ChatTemplateError(f"cannot read this file of the tokenizer: {reason}", where=path) from error
    return value if isinstance(value, dict) else {}


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ChatTemplateError(f"cannot read the chat template: {reason}", where=path) from error

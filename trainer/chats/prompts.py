"""Chats whose next answer is asked for, as texts that a model continues."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.chats.chat import read_prompt
from trainer.chats.errors import BadChatError
from trainer.contract.errors import TrainerError
from trainer.contract.prompts import Prompt


@dataclass(frozen=True)
class ChatOptions:
    """The chat template to use, as in data.corpus.chat."""

    template_file: str | None = None
    template_name: str | None = None
    date: str | None = None


@dataclass(frozen=True)
class Texts:
    """Prompts as texts."""

    texts: list[str]
    end: str | None = None
    """Token that ends an answer; None without chats, or if it is unknown."""


def texts_of(prompts: Sequence[Prompt], tokenizer: str, options: ChatOptions) -> Texts:
    """The texts of prompts. `tokenizer` is the path of a tokenizer.json or of its directory.

    Raises:
        TrainerError: a chat cannot be rendered, or there is no chat template.
    """
    if all(isinstance(prompt, str) for prompt in prompts):
        return Texts([str(prompt) for prompt in prompts])
    from trainer.chats.files import load_template  # imports Jinja, which few runs need

    file = Path(tokenizer)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise TrainerError(
            f"a prompt has messages, but the tokenizer {tokenizer} has no chat template. Name a tokenizer.json with one"
        )
    template = load_template(
        file,
        Path(options.template_file) if options.template_file else None,
        name=options.template_name,
        date=datetime.date.fromisoformat(options.date) if options.date else None,
    )
    texts = []
    for number, prompt in enumerate(prompts, 1):
        if isinstance(prompt, str):
            texts.append(prompt)
            continue
        try:
            texts.append(template.render(read_prompt(prompt), add_generation_prompt=True))
        except BadChatError as error:
            raise TrainerError(f"prompt {number}: {error.reason}") from error
    return Texts(texts, template.end_of_turn())

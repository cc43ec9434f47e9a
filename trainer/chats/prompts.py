"""Chats whose next answer is asked for, as texts that a model continues."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.chats.chat import read_prompt
from trainer.chats.errors import BadChatError, ChatTemplateError
from trainer.chats.omissions import require_messages, require_tools
from trainer.contract.errors import TrainerError
from trainer.contract.prompts import Prompt, first_mistakes


@dataclass(frozen=True)
class ChatOptions:
    """The chat template to use, as in data.corpus.chat."""

    template_file: str | None = None
    template_name: str | None = None
    date: str | None = None
    """Date that the template writes. Default: today's, since a question is asked today, while a corpus stays."""


@dataclass(frozen=True)
class Texts:
    """Prompts as texts."""

    texts: list[str]
    ends: tuple[str, ...] = ()
    """Tokens that end an answer; empty without chats, or if they are unknown."""


def texts_of(prompts: Sequence[Prompt], tokenizer: str, options: ChatOptions) -> Texts:
    """The texts of prompts. `tokenizer` is the path of a tokenizer.json or of its directory.

    Raises:
        TrainerError: chats cannot be rendered, the template leaves out a part of them, or there is none.
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
        date=datetime.date.fromisoformat(options.date) if options.date else datetime.date.today(),
    )
    texts, ends, mistakes = list[str](), dict[str, None](), list[str]()
    for number, prompt in enumerate(prompts, 1):
        if isinstance(prompt, str):
            texts.append(prompt)
            continue
        try:
            chat = read_prompt(prompt)
            text = template.render(chat, add_generation_prompt=True)
            require_tools(template, chat)
            require_messages(template, chat, text, add_generation_prompt=True)
        except BadChatError as error:
            mistakes.append(f"prompt {number}: {error.reason}")
            continue
        except ChatTemplateError as error:
            raise ChatTemplateError(f"prompt {number}: {error}") from error
        texts.append(text)
        ends |= dict.fromkeys(template.ends_of_turn(chat))
    if mistakes:
        raise TrainerError(first_mistakes(mistakes))
    return Texts(texts, tuple(ends))

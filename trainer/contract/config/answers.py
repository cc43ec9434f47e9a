"""Answers of the model in training to prompts."""

from __future__ import annotations

from trainer.contract.config.choice import Choice
from trainer.contract.config.path import FilePath
from trainer.contract.config.values import PositiveFloat
from trainer.contract.record import config_section

MAX_PROMPTS = 64
"""Maximum number of prompts, since every evaluation waits for the answers."""


@config_section
class AnswersSettings(Choice):
    """Prompts that the model in training answers before the first step, at each training.eval_interval and at the
    end."""

    prompts: FilePath | None = None
    """JSON Lines file of at most 64 prompts, with a key `prompt` or `messages` in each line; null for no
    answers. Messages are rendered with the chat template of data.corpus.chat or else of data.tokenizer."""
    max_seconds: PositiveFloat = 120.0
    """Maximum time of the answers of one evaluation in seconds. What is written until then is kept."""


@config_section
class AnswersConfig(AnswersSettings):
    """Prompts, and the tokenizer that reads them."""

    tokenizer: str | None = None
    """Tokenizer by name, or the path of its files."""
    eod_token: str | None = None
    """Token at the end of a document. Default: the tokenizer's."""
    chat_template_file: FilePath | None = None
    """Path of a chat template. Default: the tokenizer's."""
    chat_template: str | None = None
    """Name of the chat template to use if the tokenizer has several."""
    chat_date: str | None = None
    """Date (YYYY-MM-DD) for chat templates that write today's date."""

"""Errors of chat templates, and of single chats."""

from __future__ import annotations

from trainer.contract.errors import TrainerError


class ChatTemplateError(TrainerError):
    """A chat template cannot be used, whatever the chat."""


class BadChatError(Exception):
    """A chat cannot be used. The template may suit other chats."""

    def __init__(self, kind: str, reason: str) -> None:
        """`kind` is the reason in a few words, which all chats with the same mistake share."""
        super().__init__(reason)
        self.kind, self.reason = kind, reason

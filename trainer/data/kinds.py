"""The kinds of datasets. To add one, write its object (`trainer.data.kind`), and choose it here."""

from __future__ import annotations

from trainer.contract.config import BlendConfig
from trainer.data.chats import Chats
from trainer.data.gpt import GptSamples, MockSamples
from trainer.data.kind import Kind

GPT, MOCK, CHATS = GptSamples(), MockSamples(), Chats()


def kind_of(data: BlendConfig) -> Kind:
    """The kind of the datasets of a run."""
    if data.mock:
        return MOCK
    return CHATS if data.sft else GPT

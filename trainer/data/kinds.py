"""The kinds of datasets: the class that cuts samples, and what it needs of a pair. To add one, add its object here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from trainer.contract.config import BlendConfig
from trainer.data.documents import require_ends


class Kind(ABC):
    """A kind of datasets."""

    dataset: ClassVar[type[GPTDataset]]
    """Class of the samples, which have tokens, labels and a loss_mask. Its name is in the names of index files."""

    @abstractmethod
    def check_pair(self, prefix: str, corpus: IndexedDataset, data: BlendConfig) -> None:
        """Check that samples can be cut from a pair.

        Raises:
            ConfigError: they cannot.
        """


class GptSamples(Kind):
    """Samples from a continuous stream of documents. Each token is predicted."""

    dataset = GPTDataset

    def check_pair(self, prefix: str, corpus: IndexedDataset, data: BlendConfig) -> None:
        """Check that documents end with data.eod_id, if the trainer must know where they end."""
        if data.needs_eod:
            assert data.eod_id is not None
            advice = "Set data.eod_id to the end-of-document token of the corpus, or tokenize it with one"
            require_ends(prefix, corpus, data.eod_id, advice)


class MockSamples(Kind):
    """Synthetic samples."""

    dataset = MockGPTDataset

    def check_pair(self, prefix: str, corpus: IndexedDataset, data: BlendConfig) -> None:
        """There are no pairs."""


GPT, MOCK = GptSamples(), MockSamples()


def kind_of(data: BlendConfig) -> Kind:
    """The kind of the datasets of a run."""
    return MOCK if data.mock else GPT

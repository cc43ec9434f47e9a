"""Random samples, so that a trial needs no data."""

from __future__ import annotations

import torch

from trainer.contract.config import TrainerConfig
from trainer.data.microbatch import IS_FIRST, PADDING


class RandomSamples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples in the format of Megatron-Core's GPTDataset, or of one chat each. Experts get about the same number of
    random tokens."""

    def __init__(self, config: TrainerConfig, vocab_size: int) -> None:
        """All tokens are below `vocab_size`."""
        self._length, self._vocab_size = config.model.seq_length, vocab_size
        self._seed, self._is_chat = config.training.seed, config.data.sft

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed + index)
        text = torch.randint(self._vocab_size, (self._length + 1,), generator=generator)
        sample = {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(self._length)}
        if self._is_chat:
            is_first = torch.arange(self._length) == 0
            sample |= {IS_FIRST: is_first, PADDING: torch.tensor(0)}
        return sample

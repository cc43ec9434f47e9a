"""Samples of random tokens, so that the test needs no data."""

from __future__ import annotations

import torch

from trainer.contract.config import TrainerConfig


class RandomSamples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples like those of Megatron-Core's GPTDataset. Experts get about the same number of random tokens.

    All tokens are in the vocabulary shard of tensor-parallel rank 0, because no other rank computes their logits.
    """

    def __init__(self, config: TrainerConfig) -> None:
        rows = config.model.padded_vocab_size // config.parallelism.tensor_model_parallel_size
        self._length, self._rows = config.model.seq_length, min(rows, config.model.vocab_size)
        self._seed = config.training.seed

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed + index)
        text = torch.randint(self._rows, (self._length + 1,), generator=generator)
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(self._length)}

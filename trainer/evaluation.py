"""The loss on samples that are not trained on."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.config import TrainerConfig
from trainer.data import data_iterators
from trainer.step import forward_backward


@torch.no_grad()
def evaluate(
    model: list[DistributedDataParallel],
    dataset: torch.utils.data.Dataset | None,
    config: TrainerConfig,
    groups: ProcessGroupCollection,
) -> float:
    """The mean loss over the first eval_iters global batches of the dataset: the same samples each time."""
    iterators = data_iterators(model, dataset, config, groups, 0, config.training.eval_iters)
    for chunk in model:
        chunk.eval()
    losses = [
        forward_backward(model, iterators, config, groups, forward_only=True)[0]
        for _ in range(config.training.eval_iters)
    ]
    for chunk in model:
        chunk.train()
    return sum(losses) / len(losses)

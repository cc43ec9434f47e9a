"""The losses on validation and test samples during training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.contract.config import TrainerConfig
from trainer.contract.model.batch_size import Batch
from trainer.data.loader import data_iterators
from trainer.loss import Objective
from trainer.step import forward_backward


@contextlib.contextmanager
def evaluating(model: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Evaluation mode of the chunks, such as without dropout."""
    for chunk in model:
        chunk.eval()
    yield
    for chunk in model:
        chunk.train()


@torch.no_grad()
def mean_losses(
    model: list[DistributedDataParallel],
    objective: Objective,
    dataset: torch.utils.data.Dataset | None,
    config: TrainerConfig,
    groups: ProcessGroupCollection,
    beat: Callable[[], None],
) -> dict[str, float] | None:
    """Mean losses of the tokens of the first eval_iters global batches of the dataset, the same samples each time.

    They are the `loss` and the further losses and metrics of `objective`, without those that have no tokens. None if no
    token counts, because data.eod_mask_loss masks all of them. `config` is that of the split
    (`trainer.contract.validation.config_of_split`). Calls `beat` before each batch.
    """
    size = config.training.global_batch_size
    batches = [Batch(index * size, size) for index in range(config.training.eval_iters)]
    iterators = data_iterators(model, dataset, config, groups, batches)
    objective.measure(True)
    found = []
    with evaluating(model):
        for batch in batches:
            beat()
            totals, _ = forward_backward(
                model, objective, iterators, config, groups, batch.size, forward_only=True
            )
            torch.distributed.all_reduce(totals)
            found.append(totals)
    sums = torch.stack(found).sum(0).view(-1, 2).tolist()
    means = {
        name: total / tokens
        for name, (total, tokens) in zip(("loss", *objective.names), sums, strict=True)
        if tokens
    }
    return means if "loss" in means else None

"""The objective of a configuration on one microbatch, in the test's own process."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection

from tests.trainer.single_rank import ON_CPU
from trainer.contract.config import TrainerConfig
from trainer.data.microbatch import MicroBatch
from trainer.loss import Objective
from trainer.model.build import build_model


def microbatch(config: TrainerConfig) -> MicroBatch:
    """Two samples of random tokens, a third of which do not count."""
    random = torch.Generator().manual_seed(3)
    shape = 2, config.model.seq_length
    tokens, labels = (torch.randint(1000, shape, generator=random) for _ in range(2))
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        loss_mask=(torch.rand(shape, generator=random) > 1 / 3).float(),
        position_ids=torch.arange(shape[1]).expand(shape),
        boundaries=None,
    )


def complete_logits(
    config: TrainerConfig, groups: ProcessGroupCollection, batch: MicroBatch
) -> tuple[DistributedDataParallel, torch.Tensor]:
    """The model of `config`, and its logits [b, s, v] in fp32, for a reference of sums_and_gradients."""
    [chunk] = build_model(config, groups, ON_CPU)
    chunk.zero_grad_buffer()
    return chunk, chunk(batch.tokens, batch.position_ids, None).float()


def sums_and_gradients(
    config: TrainerConfig, groups: ProcessGroupCollection, batch: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sums for the log, and the gradients by parameter, of the objective of `config`."""
    model = build_model(config, groups, ON_CPU)
    objective = Objective(config, model)
    objective.measure(True)
    [chunk] = model
    chunk.zero_grad_buffer()
    further = objective.begin(chunk, batch)
    losses = chunk(batch.tokens, batch.position_ids, None, labels=batch.labels, **further)
    total, _, sums = objective.of_microbatch(losses, batch, chunk)
    total.backward()
    return sums, {name: each.main_grad.clone() for name, each in chunk.named_parameters()}

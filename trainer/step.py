"""One optimizer step: forward and backward over the pipeline's micro-batches, then the update."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from trainer.config import TrainerConfig
from trainer.data import MicroBatch, num_microbatches
from trainer.errors import NonFiniteError

DataIterators = list[Iterator[MicroBatch] | None]
"""One per model chunk; None where the chunk is neither the model's first nor its last."""


@dataclass
class TrainingState:
    """What a step changes and a checkpoint holds."""

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    iteration: int = 0
    """Optimizer steps done."""


@dataclass(frozen=True)
class StepResult:
    """What one step measured, equal on all ranks."""

    loss: float
    """Mean over the tokens of the global batch (nats)."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """The learning rate that the update used."""
    stop: bool
    """Whether some rank was asked to stop."""


def train_step(
    state: TrainingState,
    batches: DataIterators,
    config: TrainerConfig,
    groups: ProcessGroupCollection,
    asked_to_stop: Callable[[], bool],
) -> StepResult:
    """Does the next optimizer step.

    Raises:
        NonFiniteError: on all ranks, when the loss or the gradient norm is not finite; do not save after it.
    """
    seed_dropout(config.training.seed, state.iteration, groups)
    for chunk in state.model:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    loss, stop = forward_backward(state.model, batches, config, groups, asked_to_stop=asked_to_stop)
    where = f"at iteration {state.iteration + 1}; nothing of this step is saved"
    if not math.isfinite(loss):
        raise NonFiniteError(f"the loss is {loss} {where}")
    lr = state.optimizer.param_groups[0]["lr"]
    _, norm, _ = state.optimizer.step()
    grad_norm = float(norm)  # a tensor on a GPU, since megatron-core 0.17
    if not math.isfinite(grad_norm):
        raise NonFiniteError(f"the gradient norm is {grad_norm} {where} (loss {loss})")
    state.scheduler.step(1)
    state.iteration += 1
    return StepResult(loss=loss, grad_norm=grad_norm, lr=lr, stop=stop)


def forward_backward(
    model: list[DistributedDataParallel],
    batches: DataIterators,
    config: TrainerConfig,
    groups: ProcessGroupCollection,
    *,
    asked_to_stop: Callable[[], bool] = lambda: False,
    forward_only: bool = False,
) -> tuple[float, bool]:
    """One global batch. Returns the mean loss over its tokens and whether any rank was asked to stop."""
    results: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=batches if len(batches) > 1 else batches[0],
        model=model,
        num_microbatches=num_microbatches(config, groups),
        seq_length=config.model.seq_length,
        micro_batch_size=config.training.micro_batch_size,
        forward_only=forward_only,
    )
    # Sum of losses, tokens and requests to stop in one small all-reduce over all ranks; fp64 counts exactly.
    totals = torch.zeros(3, dtype=torch.float64)
    if results and groups.tp.rank() == 0:  # the last stage; its tensor-parallel ranks hold the same numbers
        totals[:2] = torch.stack(results).sum(0).double()
    totals[2] = asked_to_stop()
    if config.device == "cuda":
        totals = totals.cuda()
    torch.distributed.all_reduce(totals)
    loss_sum, tokens, requests = totals.tolist()
    return loss_sum / max(tokens, 1), requests > 0


def _forward_step(batches: Iterator[MicroBatch] | None, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Runs one chunk on one micro-batch, as the pipeline schedule asks for it."""
    if batches is None:
        return chunk(input_ids=None, position_ids=None, attention_mask=None), None
    batch = next(batches)
    output = chunk(
        input_ids=batch.tokens, position_ids=batch.position_ids, attention_mask=None, labels=batch.labels
    )

    def loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[b, s] -> the sum to differentiate, the tokens in it, and both for the log."""
        total, tokens = (token_losses.float() * batch.loss_mask).sum(), batch.loss_mask.sum()
        # The schedule scales by all tokens of the global batch, and by the context-parallel size: not here.
        return total, tokens.int(), torch.stack([total.detach(), tokens])

    return output, loss


def seed_dropout(seed: int, iteration: int, groups: ProcessGroupCollection) -> None:
    """Starts the generators of a step from the run's seed, the iteration and this rank's place.

    So a resumed run draws what the undisturbed one would have, and checkpoints need no generator state.
    Ranks of one tensor-parallel group must draw alike outside its regions: Core offsets the rest by rank.
    """
    place = f"{seed} {iteration} {groups.pp.rank()} {groups.dp_cp.rank()}"
    step_seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:6], "big")
    torch.manual_seed(step_seed)
    model_parallel_cuda_manual_seed(step_seed)

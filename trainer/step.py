"""One optimizer step: forward and backward over the microbatches, a check for finite values, then the update."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from trainer.contract.attention.visibility import visible_pairs
from trainer.contract.config import OptimizerConfig, TrainerConfig
from trainer.contract.errors import NonFiniteError
from trainer.contract.files.metrics_columns import OBJECTIVE
from trainer.contract.model.batch_size import Batch, batch_size_at
from trainer.contract.wording import rank_list
from trainer.data.loader import num_microbatches
from trainer.data.microbatch import MicroBatch
from trainer.faults.best import BestWatch
from trainer.faults.spikes import SpikeWatch
from trainer.loss import Objective
from trainer.model.experts import Router, expert_biases, frozen_biases, take_statistics
from trainer.optimizer import gradients
from trainer.optimizer.schedule import Schedule
from trainer.optimizer.weight_average import WeightAverage

DataIterators = list[Iterator[MicroBatch] | None]
"""One per model chunk; None for chunks that read no samples (`trainer.data.loader.reads_samples`)."""


@dataclass
class TrainingState:
    """State that a step changes and a checkpoint contains."""

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: Schedule
    spikes: SpikeWatch
    objective: Objective
    best: BestWatch
    routers: tuple[Router, ...] = ()
    """Routers of this rank's MoE layers."""
    is_partly_frozen: bool = False
    """True if a rank has parameters that are not trained."""
    average: WeightAverage | None = None
    """Average of the weights; None without training.ema_decay."""
    has_adapters: bool = False
    """True if the run trains adapters, which are then all that its checkpoints contain."""
    iteration: int = 0
    """Number of completed steps."""
    consumed_samples: int = 0
    """Number of training samples that these steps have read."""
    consumed_tokens: int = 0
    """Number of tokens of these samples, without padding. Their length may have changed."""


@dataclass(frozen=True)
class Vote:
    """Flags of a rank at the end of a step. They are combined with "or" over all ranks."""

    stop: bool = False
    """The rank was asked to stop."""
    save: bool = False
    """A checkpoint is due."""
    writing: bool = False
    """The rank's part of a background save is not on disk yet."""
    failed: bool = False
    """The rank's part of a background save could not be written."""


@dataclass(frozen=True)
class StepResult:
    """Results of one step. They are equal on all ranks."""

    batch: Batch
    consumed_tokens: int
    """Number of tokens that this step and all previous ones have read."""
    loss: float
    """Mean over the tokens of the global batch (nats), without further losses."""
    grad_norm: float | None
    """Global norm before clipping; None if fp16 gradients overflowed, which lowers the loss scale."""
    lr: float
    """Learning rate of the update, before the lr_mult of a parameter group."""
    loss_scale: float
    """Loss scale; always 1 without fp16."""
    spike: float | None
    """Ratio of the loss to the median of the previous steps if the loss is a spike, else None."""
    skipped: bool
    """True if the update was skipped because of an overflow or a spike."""
    vote: Vote
    terms: dict[str, float] = field(default_factory=dict)
    """Further losses and metrics by name, as means over their tokens (`trainer.loss`). Metrics are not in each step."""
    visible_pairs: float | None = None
    """Pairs of a query and a key of the same document in the global batch; None if samples are not separated."""
    padding: int = 0
    """Tokens of the global batch that only fill samples of chats."""
    experts: torch.Tensor | None = None
    """Statistics of the routers in the global batch, on the CPU (`trainer.model.experts.take_statistics`)."""


def train_step(
    state: TrainingState,
    batches: DataIterators,
    config: TrainerConfig,
    groups: ProcessGroupCollection,
    vote: Callable[[], Vote],
) -> StepResult:
    """Run the next step. No weight changes until the loss and the gradient norm are known to be finite.

    Reading these two numbers, between the backward pass and the update, is the only time that a step waits for the GPU.

    Raises:
        NonFiniteError: on all ranks, if the loss or the gradient norm is not finite. Nothing is updated.
    """
    seed_dropout(config.training.seed, state.iteration, groups)
    batch = Batch(state.consumed_samples, batch_size_at(config.training, state.consumed_samples))
    biases = expert_biases(state.routers)
    previous_biases = [bias.clone() for bias in biases]
    agreed, totals, loss_scale, overflowed = _compute_gradients(state, batches, config, groups, batch, vote)
    divisor = gradients.divisor(agreed.tokens, config)
    grad_norm = agreed.norm / divisor
    terms = {
        name: mean for name, mean in zip(state.objective.names, agreed.terms, strict=True) if mean is not None
    }
    minimized = {"loss": agreed.loss, OBJECTIVE: terms.get(OBJECTIVE, agreed.loss)}
    if not all(map(math.isfinite, (*minimized.values(), grad_norm))):
        _restore(biases, previous_biases)
        raise _non_finite(minimized, grad_norm, totals, state.optimizer, state.iteration + 1, batch)
    # An overflow is due to the loss scale: it is not a spike and does not count against skip_loss_spikes.
    spike = None if overflowed else state.spikes.spike_ratio(agreed.loss)
    skipped = overflowed or (spike is not None and state.spikes.skip())
    lr = state.scheduler.rate()
    if skipped:
        _restore(biases, previous_biases)
    else:
        _update(state, agreed.loss, divisor, config.optimizer.clip_grad, grad_norm)
    if overflowed:
        _require_reducible(loss_scale, config.optimizer, state.iteration + 1)
    state.scheduler.step(1)
    state.iteration += 1
    state.consumed_samples += batch.size
    state.consumed_tokens += batch.size * config.model.seq_length - agreed.contents.padding
    return StepResult(
        batch=batch,
        consumed_tokens=state.consumed_tokens,
        loss=agreed.loss,
        terms=terms,
        visible_pairs=agreed.contents.visible_pairs if config.data.separates_documents else None,
        padding=agreed.contents.padding,
        grad_norm=None if overflowed else grad_norm,
        lr=lr,
        loss_scale=loss_scale,
        spike=spike,
        skipped=skipped,
        vote=agreed.vote,
        experts=None if config.model.num_moe_experts is None else agreed.statistics,
    )


def _compute_gradients(
    state: TrainingState,
    batches: DataIterators,
    config: TrainerConfig,
    groups: ProcessGroupCollection,
    batch: Batch,
    vote: Callable[[], Vote],
) -> tuple[_Agreed, torch.Tensor, float, bool]:
    """Compute the gradients of a global batch. Returns the numbers of all ranks, this rank's totals of
    `forward_backward`, the loss scale, and True if fp16 gradients overflowed."""
    _clear_gradients(state)
    _start_gathering(state)
    frozen = frozen_biases(state.routers)
    previous_frozen = [bias.clone() for bias in frozen]
    state.objective.measure((state.iteration + 1) % config.logging.log_interval == 0)
    totals, contents = forward_backward(state.model, state.objective, batches, config, groups, batch.size)
    _restore(frozen, previous_frozen)
    optimizer = state.optimizer
    # Only fp16 has a scale, and reading it waits for the GPU.
    loss_scale = float(optimizer.get_loss_scale()) if config.training.precision == "fp16" else 1.0
    overflowed = optimizer.prepare_grads()
    norm = totals.new_zeros(1) if overflowed else gradients.norm(optimizer, totals)
    statistics = take_statistics(state.routers, config.model, totals.device)
    return _agree(totals, norm, vote(), contents, statistics), totals, loss_scale, overflowed


def _update(state: TrainingState, loss: float, divisor: float, clip_grad: float, grad_norm: float) -> None:
    """Update the weights and their average. `loss` becomes one of those that later spikes are compared with."""
    state.spikes.remember(loss)
    gradients.update(state.optimizer, divisor, clip_grad, grad_norm)
    if state.average is not None:
        state.average.update()


def _clear_gradients(state: TrainingState) -> None:
    for chunk in state.model:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()


def _start_gathering(state: TrainingState) -> None:
    """Start gathering the weights that the previous step has updated.

    This does nothing if each module starts it for its own weights (`trainer.model.build`).
    """
    for chunk in state.model:
        if chunk.ddp_config.align_param_gather:
            chunk.start_param_sync()


class Contents(NamedTuple):
    """Contents of samples that are not one document each."""

    visible_pairs: float = 0.0
    """Pairs of a query and a key of the same document; 0 if samples are not separated."""
    padding: int = 0
    """Tokens of no chat."""


def forward_backward(
    model: list[DistributedDataParallel],
    objective: Objective,
    batches: DataIterators,
    config: TrainerConfig,
    groups: ProcessGroupCollection,
    batch_size: int,
    *,
    forward_only: bool = False,
) -> tuple[torch.Tensor, Contents]:
    """Run one global batch of `batch_size` samples. Returns this rank's [sum of losses, tokens] in fp64 on its device,
    and what its samples hold.

    The sum and the number of each further loss follow the tokens. All are zero on ranks that do not compute the loss,
    and on all but one of those that compute the same loss.
    """
    results: list[tuple[torch.Tensor, _Samples]] = get_forward_backward_func()(
        forward_step_func=functools.partial(_forward_step, objective),
        data_iterator=batches if len(batches) > 1 else batches[0],
        model=model,
        num_microbatches=num_microbatches(batch_size, config, groups),
        seq_length=config.model.seq_length,
        micro_batch_size=config.training.micro_batch_size,
        forward_only=forward_only,
    )
    if results and groups.tp.rank() == 0:  # last stage; all its tensor-parallel ranks have the same numbers
        contents = _contents([samples for _, samples in results], config)
        if groups.cp.rank() > 0:  # all context-parallel ranks know the complete samples
            contents = Contents()
        return torch.stack([totals for totals, _ in results]).sum(0).double(), contents
    size = 2 + 2 * len(objective.names)
    return torch.zeros(size, dtype=torch.float64, device=config.device), Contents()


class _Samples(NamedTuple):
    """The boundaries and the padding of a microbatch, without its tensors on the GPU."""

    boundaries: torch.Tensor | None
    padding: tuple[int, ...] | None


def _contents(batches: Sequence[_Samples], config: TrainerConfig) -> Contents:
    """Contents of the samples of some microbatches. Padding does not count as a document."""
    lengths = [each.boundaries.diff().tolist() for each in batches if each.boundaries is not None]
    padding = [length for each in batches for length in each.padding or ()]
    pairs = visible_pairs(config.model, itertools.chain.from_iterable(lengths))
    return Contents(pairs - visible_pairs(config.model, padding), sum(padding))


class _Agreed(NamedTuple):
    """Numbers of a step, summed over all ranks."""

    loss: float
    """Mean over the tokens."""
    terms: tuple[float | None, ...]
    """Means of the other columns of the objective, None for those without tokens."""
    tokens: float
    norm: float
    """Norm of the gradients before they are divided."""
    vote: Vote
    contents: Contents
    statistics: torch.Tensor


def _agree(
    totals: torch.Tensor, norm: torch.Tensor, vote: Vote, contents: Contents, statistics: torch.Tensor
) -> _Agreed:
    """Combine the numbers and votes of all ranks in one small all-reduce. fp64 keeps the counts exact.

    `norm` is already the norm over all ranks.
    """
    own = torch.tensor([vote.stop, vote.save, vote.writing, vote.failed, *contents], dtype=torch.float64)
    numbers = torch.cat([totals, own.to(totals.device, non_blocking=True), statistics.flatten()])
    torch.distributed.all_reduce(numbers)
    numbers = torch.cat([norm, numbers]).cpu()
    end_of_losses, end_of_own = 1 + len(totals), 1 + len(totals) + len(own)
    agreed_norm, *sums = numbers[:end_of_losses].tolist()
    terms = (total / number if number else None for total, number in zip(sums[2::2], sums[3::2], strict=True))
    *votes, pairs, padding = numbers[end_of_losses:end_of_own].tolist()
    return _Agreed(
        loss=sums[0] / max(sums[1], 1),
        terms=tuple(terms),
        tokens=sums[1],
        norm=agreed_norm,
        vote=Vote(*(count > 0 for count in votes)),
        contents=Contents(pairs, int(padding)),
        statistics=numbers[end_of_own:].view(statistics.shape),
    )


def _require_reducible(loss_scale: float, optimizer: OptimizerConfig, iteration: int) -> None:
    """Check that the loss scale at which fp16 gradients overflowed can be lowered.

    Raises:
        NonFiniteError: it is the smallest one.
    """
    if loss_scale <= (optimizer.loss_scale or optimizer.min_loss_scale):
        raise NonFiniteError(
            f"fp16 gradients overflow at the smallest loss scale allowed, {loss_scale:g}, at iteration {iteration}; "
            "nothing of this step is saved"
        )


def _non_finite(
    losses: Mapping[str, float],
    grad_norm: float,
    totals: torch.Tensor,
    optimizer: MegatronOptimizer,
    iteration: int,
    batch: Batch,
) -> NonFiniteError:
    """The error for one of the `losses` or a gradient norm that is not finite. It names the ranks that have the value.

    Every rank must call this.
    """
    wrong = next((name for name, value in losses.items() if not math.isfinite(value)), None)
    if wrong is None:
        is_finite = all(bool(each.isfinite().all()) for each in gradients.of_the_norm(optimizer))
    else:
        is_finite = bool(totals.isfinite().all())
    flags = torch.zeros(torch.distributed.get_world_size(), device=totals.device)
    flags[torch.distributed.get_rank()] = not is_finite
    torch.distributed.all_reduce(flags)
    affected = [rank for rank, flag in enumerate(flags.tolist()) if flag]
    named = rank_list(affected) if affected else "no single rank (the sum overflows)"
    if wrong is None:
        # The gradients are already summed and sharded over data-parallel ranks, so the rank that has the
        # non-finite value is not necessarily the one that computed it.
        what, where = f"the gradient norm is {grad_norm}", f"loss {losses['loss']}; in the shard of {named}"
    else:
        what, where = f"the {wrong} is {losses[wrong]}", f"on {named}"
    samples = f"samples {batch.first} to {batch.first + batch.size - 1}"
    return NonFiniteError(
        f"{what} at iteration {iteration} ({samples}; {where}); nothing of this step is saved"
    )


def _restore(biases: Sequence[torch.Tensor], previous: Sequence[torch.Tensor]) -> None:
    """Undo Core's update of the experts' biases, which ends the backward pass (finalize_model_grads.py)."""
    for bias, value in zip(biases, previous, strict=True):
        bias.copy_(value)


def _forward_step(
    objective: Objective, batches: Iterator[MicroBatch] | None, chunk: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., object] | None]:
    """Run one chunk on one microbatch, in the form that the pipeline schedule expects."""
    if batches is None:  # a stage without embedding and loss, whose input is the output of the stage before
        return chunk(input_ids=None, position_ids=None, attention_mask=None), None
    batch = next(batches)
    output = chunk(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        # Core passes this to every layer's attention, which takes the boundaries of documents in place of a mask.
        attention_mask=batch.boundaries,
        labels=batch.labels,
        **objective.begin(chunk, batch),
    )

    def loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, object]:
        """[b, s] -> the sum to differentiate, its number of tokens, and the sums and samples for the log."""
        total, tokens, sums = objective.of_microbatch(token_losses, batch, chunk)
        return total, tokens, (sums, _Samples(batch.boundaries, batch.padding))

    return output, loss


def seed_dropout(seed: int, iteration: int, groups: ProcessGroupCollection) -> None:
    """Seed the random generators of a step from the run's seed, the iteration and this rank's position.

    A resumed run then draws the same numbers as an uninterrupted one, and checkpoints need no generator state.
    Ranks of one tensor-parallel group must draw the same numbers outside tensor-parallel regions; inside them, Core
    adds an offset by rank.
    """
    position = f"{seed} {iteration} {groups.pp.rank()} {groups.dp_cp.rank()}"
    step_seed = int.from_bytes(hashlib.sha256(position.encode()).digest()[:6], "big")
    # torch.manual_seed would also seed other kinds of accelerators, and format a traceback for each of them.
    torch.default_generator.manual_seed(step_seed)
    model_parallel_cuda_manual_seed(step_seed)

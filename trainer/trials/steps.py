"""The steps of a trial: trains on random samples and measures the time and the memory of this rank."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import resource
import time
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.model.batch_size import Batches
from trainer.contract.trials import Memory
from trainer.data.loader import data_iterators, num_microbatches
from trainer.metrics.console import Log
from trainer.metrics.timers import Timers, Times
from trainer.model.cuda_graphs import WARMUP_STEPS, LayerGraphs
from trainer.step import Vote, train_step
from trainer.train import build_state
from trainer.trials.samples import RandomSamples

GIB = 2**30


@dataclass(frozen=True)
class Trained:
    """Measurements of this rank in the steps after the warm-up."""

    step_s: tuple[float, ...]
    """Time of each step, measured as in a training."""
    times: Times
    """Parts of all these steps together."""
    num_microbatches: int
    """Microbatches of this rank in each step."""


def train(
    config: TrainerConfig, groups: ProcessGroupCollection, log: Log, vocab_size: int, warmup: int, steps: int
) -> Trained:
    """Build the model and train on samples with tokens below `vocab_size`: `warmup` steps, and then `steps` measured
    ones. Recording CUDA graphs is part of a longer warm-up.

    Raises:
        TrainerError: gradients overflow, or a loss is not finite.
        torch.OutOfMemoryError: the training does not fit. For other errors, see
            `trainer.faults.machine_failures`.
    """
    config = _without_ramp_up(config)
    warmup += 0 if config.training.cuda_graph_impl == "none" else WARMUP_STEPS
    state = build_state(config, groups, log)
    timers = Timers(config.device)
    timers.attach(state.model, state.optimizer)
    plan = Batches(dataclasses.replace(config.training, train_iters=warmup + steps))
    iterators = data_iterators(state.model, RandomSamples(config, vocab_size), config, groups, plan)
    batches = [iterator and timers.waited_for(iterator) for iterator in iterators]
    graphs = LayerGraphs(config, state, groups, log)
    gc.collect()
    gc.freeze()  # as in a training
    before, ends = Times(), [time.perf_counter()]
    for iteration in range(1, warmup + steps + 1):
        graphs.before(iteration)
        if train_step(state, batches, config, groups, Vote).skipped:
            raise TrainerError(
                f"the gradients of step {iteration} overflow, so the optimizer has no state to measure"
            )
        ends.append(time.perf_counter())
        if iteration == warmup:
            before = timers.totals()
    # The update of the last step can be unfinished, and so could that of the last one before the measured steps.
    times = timers.totals() - before
    torch.cuda.synchronize()
    graphs.close()
    measured = ends[-steps - 1 :]
    return Trained(
        step_s=tuple(end - start for start, end in itertools.pairwise(measured)),
        times=times,
        num_microbatches=num_microbatches(config.training.global_batch_size, config, groups),
    )


def _without_ramp_up(config: TrainerConfig) -> TrainerConfig:
    """The training at its full batch size, in which no step skips its update.

    The loss scale of fp16 starts at 1. With overflows, the optimizer would skip all steps and allocate no state.
    """
    training = dataclasses.replace(config.training, rampup_batch_size=None, skip_loss_spikes=0)
    optimizer = dataclasses.replace(config.optimizer, initial_loss_scale=1.0, min_loss_scale=1.0)
    return dataclasses.replace(config, training=training, optimizer=optimizer)


def asked_memory(error: BaseException) -> str:
    """The part of an error for missing memory that says what was asked for."""
    return ". ".join(str(error).splitlines()[0].split(". ")[:2]) if str(error) else type(error).__name__


def used_memory(device: str) -> Memory:
    """The memory that this process has used so far."""
    if device == "cpu":
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Memory(in_use_gib=kib * 1024 / GIB)
    free, total = torch.cuda.mem_get_info()
    # torch keeps what it has reserved, and so the memory in use now is the largest.
    return Memory(
        allocated_gib=torch.cuda.max_memory_allocated() / GIB,
        reserved_gib=torch.cuda.max_memory_reserved() / GIB,
        in_use_gib=(total - free) / GIB,
        device_gib=total / GIB,
    )

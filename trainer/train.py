"""A training run from its configuration to its last checkpoint, top to bottom."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from megatron.core.process_groups_config import ProcessGroupCollection

from trainer import checkpoint, distributed, kernels, rendezvous
from trainer.batch_size import batch_size_at
from trainer.config import TrainerConfig
from trainer.data import num_microbatches, reads_samples
from trainer.datasets import build_datasets
from trainer.errors import RunDirectoryBusyError
from trainer.layout import check_layout
from trainer.logging import Log
from trainer.loop import run_steps
from trainer.metrics import Metrics
from trainer.model import build_model
from trainer.optimizer import build_optimizer, build_scheduler
from trainer.resolve import resolve
from trainer.run_directory import RunDirectory, publish
from trainer.spikes import SpikeWatch
from trainer.step import TrainingState
from trainer.stopping import StopRequest


def train(config: TrainerConfig, stop_file: Path | None = None, progress: bool = False) -> None:
    """Trains from the newest checkpoint, or from the seed, to train_iters, or until asked to stop.

    Leaves DONE in the run directory when the last iteration is saved, STOPPED when an earlier one is.

    Raises:
        ConfigError: the configuration does not fit itself or the data.
        TrainerError: the ranks, the device or a checkpoint are not what the configuration needs.
        NonFiniteError: the loss or the gradient norm is not a number.
    """
    config = resolve(config)
    check_layout(config)
    ranks = rendezvous.find_ranks(os.environ)
    is_rank_0 = ranks.rank == 0
    stop = StopRequest(stop_file if is_rank_0 else None)
    log = Log(is_rank_0, progress)
    run, last = RunDirectory.of(config), config.training.train_iters
    groups = distributed.initialize(config, ranks, os.environ)
    is_done, newest = distributed.from_rank_0(lambda: _open(run, config))
    if is_done:
        log.line(f"{config.name}: iteration {last} is done, nothing to do")
        _finish(run, last, last)
        return

    chosen = kernels.choose(config)
    log.line(f"kernels: {chosen}")
    model = build_model(config, groups, chosen)
    optimizer = build_optimizer(config, model)
    spikes = SpikeWatch(config.training.loss_spike_factor, config.training.skip_loss_spikes)
    state = TrainingState(model, optimizer, build_scheduler(config, optimizer), spikes)
    if newest is not None:
        checkpoint.load(newest, state, config, groups)
    log.line(_summary(config, groups, newest, state))

    is_needed = any(reads_samples(chunk) for chunk in model)
    datasets = build_datasets(config, run.index_cache, config.model.padded_vocab_size, is_needed)
    metrics = Metrics(config, run, log, state.iteration, is_rank_0)
    log.start(state.iteration, last)
    checkpoints = checkpoint.Checkpoints(run.checkpoints, config, groups, log)
    run_steps(state, datasets, config, groups, checkpoints, stop, metrics, log)
    metrics.close()
    log.close()
    _finish(run, state.iteration, last)


def _open(run: RunDirectory, config: TrainerConfig) -> tuple[bool, Path | None]:
    """Makes the run directory and takes back earlier lives' marks.

    Returns whether the run was done, and the checkpoint to go on from.
    """
    run.root.mkdir(parents=True, exist_ok=True)
    _take_possession(run)
    newest = checkpoint.newest(run.checkpoints, config.checkpoint.load)
    is_done = run.done.exists() and newest == checkpoint.iteration_directory(
        run.checkpoints, config.training.train_iters
    )
    for marker in (run.done, run.stopped, run.failed):
        marker.unlink(missing_ok=True)
    return is_done, newest


def _take_possession(run: RunDirectory) -> None:
    """Locks the run directory for the life of this process: two runs in it would overwrite each other's checkpoints.

    Raises:
        RunDirectoryBusyError: another process holds it.
    """
    lock = (run.root / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunDirectoryBusyError(
            f"another process is training in {run.root}; wait for it, or name another run_dir"
        ) from None
    except OSError:
        return  # a file system without locks
    _held.append(lock)


_held: list[TextIO] = []
"""Locks end with their files, so these stay open."""


def _finish(run: RunDirectory, iteration: int, last: int) -> None:
    """Marks what the run came to, once every rank is through."""
    distributed.from_rank_0(lambda: publish(run.done if iteration >= last else run.stopped, f"{iteration}\n"))
    distributed.finalize()


def _summary(
    config: TrainerConfig, groups: ProcessGroupCollection, newest: Path | None, state: TrainingState
) -> str:
    batch_size = batch_size_at(config.training, state.consumed_samples)
    sizes = (f"{name} {getattr(groups, name.lower()).size()}" for name in ("TP", "PP", "CP", "DP"))
    return (
        f"{config.name}: {f'continues from {newest}' if newest else 'starts from random weights'}, "
        f"to iteration {config.training.train_iters}; {config.world_size} ranks on {config.device}: "
        f"{' x '.join(sizes)}, VPP {config.parallelism.virtual_pipeline_model_parallel_size or 1}, "
        f"{num_microbatches(batch_size, config, groups)} micro-batches of {config.training.micro_batch_size} per step, "
        f"{config.training.precision}"
    )

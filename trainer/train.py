"""A training run from its configuration to its last checkpoint, top to bottom."""

from __future__ import annotations

import os
from pathlib import Path

from trainer import checkpoint, distributed
from trainer.config import TrainerConfig
from trainer.data import num_microbatches, reads_samples
from trainer.datasets import build_datasets
from trainer.layout import check_layout
from trainer.logging import Log
from trainer.loop import run_steps
from trainer.metrics import Metrics
from trainer.model import build_model, vocabulary_rows
from trainer.optimizer import build_optimizer, build_scheduler
from trainer.run_directory import RunDirectory, publish
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
    check_layout(config)
    ranks = distributed.find_ranks(os.environ)
    is_rank_0 = ranks.rank == 0
    stop = StopRequest(stop_file if is_rank_0 else None)
    log = Log(is_rank_0, progress)
    run, last = RunDirectory.of(config), config.training.train_iters
    groups = distributed.initialize(config, ranks, os.environ)
    if is_rank_0:
        run.root.mkdir(parents=True, exist_ok=True)
        run.stopped.unlink(missing_ok=True)

    model = build_model(config, groups)
    optimizer = build_optimizer(config, model)
    state = TrainingState(model, optimizer, build_scheduler(config, optimizer))
    sources = [run.checkpoints] + ([Path(config.checkpoint.load)] if config.checkpoint.load else [])
    checkpoint.load(state, sources, config, groups)
    log.line(_summary(config, state, num_microbatches(config, groups)))

    if state.iteration < last:
        is_needed = any(reads_samples(chunk) for chunk in model)
        datasets = build_datasets(config, run.index_cache, vocabulary_rows(config.model), is_needed)
        metrics = Metrics(config, run, log, state.iteration, is_rank_0)
        log.start(state.iteration, last)
        run_steps(state, datasets, config, groups, run, stop, metrics, log)
        metrics.close()
        log.close()

    if is_rank_0:
        publish(run.done if state.iteration >= last else run.stopped, f"{state.iteration}\n")
    distributed.finalize()


def _summary(config: TrainerConfig, state: TrainingState, microbatches: int) -> str:
    layout = config.parallelism
    tp, pp, cp = (
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.context_parallel_size,
    )
    start = f"continues after iteration {state.iteration}" if state.iteration else "starts from random weights"
    return (
        f"{config.name}: {start}, to {config.training.train_iters}; {config.world_size} ranks on {config.device}: "
        f"TP {tp} x PP {pp} x CP {cp} x DP {config.world_size // (tp * pp * cp)}, "
        f"VPP {layout.virtual_pipeline_model_parallel_size or 1}, {microbatches} micro-batches of "
        f"{config.training.micro_batch_size} per step, {config.training.precision}"
    )

"""The training loop: step, record, save, evaluate, until the last iteration or a request to stop."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.batch_size import Batches
from trainer.checkpoint import Checkpoints
from trainer.config import TrainerConfig, TrainingConfig
from trainer.data import data_iterators
from trainer.evaluation import evaluate
from trainer.instruments import Instruments
from trainer.logging import Log
from trainer.metrics import Metrics
from trainer.step import TrainingState, Vote, train_step
from trainer.stopping import StopRequest
from trainer.watch import Watch


def run_steps(
    state: TrainingState,
    datasets: dict[str, torch.utils.data.Dataset | None],
    config: TrainerConfig,
    groups: ProcessGroupCollection,
    checkpoints: Checkpoints,
    stop: StopRequest,
    watch: Watch,
    instruments: Instruments,
    metrics: Metrics,
    log: Log,
) -> None:
    """Trains from state.iteration on; returns after the last iteration, or earlier when asked to stop, saved.

    Raises:
        NonFiniteError: see `train_step`.
    """
    last = config.training.train_iters
    remaining = Batches(config.training, state.iteration, state.consumed_samples)
    timers = instruments.timers
    iterators = data_iterators(state.model, datasets["train"], config, groups, remaining)
    batches = [iterator and timers.waited_for(iterator) for iterator in iterators]

    def evaluate_due_splits() -> None:
        for split in due_evaluations(state.iteration, config.training):
            if split in datasets:
                with timers.paused():
                    loss = evaluate(
                        state.model, datasets[split], config, groups, lambda: watch.beat("evaluate")
                    )
                metrics.evaluation(state.iteration, split, loss)
                metrics.skip_time()
        watch.beat("train", state.iteration)

    def vote() -> Vote:
        return dataclasses.replace(checkpoints.vote(), stop=stop.reason() is not None)

    def is_due(iteration: int) -> bool:
        interval = config.checkpoint.save_interval
        return interval is not None and iteration % interval == 0

    watch.beat("train", state.iteration)
    if state.iteration > 0:  # the life that saved this iteration may have stopped before it evaluated
        evaluate_due_splits()
    is_stopping = False
    while state.iteration < last and not is_stopping:
        if instruments.before(state.iteration + 1):
            metrics.skip_time()
        result = train_step(state, batches, config, groups, vote)
        watch.stepped(state.iteration)
        checkpoints.advance(result.vote)
        metrics.step(state.iteration, result)
        metrics.stragglers(state.iteration, instruments.stragglers.step())
        is_stopping = result.vote.stop
        if is_stopping:
            reason = stop.reason() or "on another rank"
            log.line(f"iteration {state.iteration}: asked to stop ({reason})")
            metrics.stop(state.iteration, reason)
        is_leaving = is_stopping or state.iteration == last
        if is_leaving:
            stop.agreed()
        if is_leaving or result.vote.save or is_due(state.iteration):
            watch.beat("save")
            checkpoints.save(state, wait=is_leaving)
            watch.beat("train", state.iteration)
            metrics.skip_time()
        if not is_stopping or state.iteration == last:
            evaluate_due_splits()
    instruments.close(state.iteration + 1)


def due_evaluations(iteration: int, training: TrainingConfig) -> list[str]:
    """The splits to evaluate after an iteration: valid at each interval and at the end, test at the end."""
    if training.eval_iters == 0:
        return []
    if iteration == training.train_iters:
        return ["valid", "test"]
    if training.eval_interval is not None and iteration % training.eval_interval == 0:
        return ["valid"]
    return []

"""Adds results to TensorBoard and Weights & Biases, at the iterations of the checkpoints.

Checkpoints may be evaluated in any order, and again, so TensorBoard's file is made from all result files of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.contract.config import to_dict
from trainer.contract.evaluation import EvaluationConfig, EvaluationResult
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import refuse_foreign_link
from trainer.evaluate.results import all_results, numbers
from trainer.metrics.console import Log
from trainer.metrics.tensorboard import open_tensorboard
from trainer.metrics.wandb import open_run, run_id

TENSORBOARD_RUN = "evaluation"
"""Subdirectory of the event files. TensorBoard reads only the newest growing file of a directory, so a file of another
job next to the files of training would end the curves."""


def draw(config: EvaluationConfig, result: EvaluationResult, log: Log) -> None:
    """Draw a new result, whose file is written. An error only results in a line in the log."""
    run_dir = Path(config.run_dir)
    run = RunDirectory.at(run_dir)
    try:
        if config.tensorboard:
            refuse_foreign_link(run.tensorboard / TENSORBOARD_RUN, run_dir)
            _draw_tensorboard(run.tensorboard / TENSORBOARD_RUN, all_results(run_dir, log), log)
        if config.wandb_project is not None:
            _draw_wandb(config, run, result, log)
    except OSError as error:
        log.line(
            f"iteration {result.iteration}: TensorBoard and Weights & Biases are not up to date: {error}"
        )


def _draw_tensorboard(directory: Path, results: Sequence[EvaluationResult], log: Log) -> None:
    """Replace the event file by one with all results in the order of their iterations.

    A new file starts at step 0, so TensorBoard drops what it has read from the old one.
    """
    before = list(directory.glob("events.out.tfevents.*"))
    board = open_tensorboard(directory, -1, log)
    if board is None:
        return
    for result in results:
        board.scalars(result.iteration, numbers(result))
    board.close()
    for file in before:
        file.unlink(missing_ok=True)


def _draw_wandb(config: EvaluationConfig, run: RunDirectory, result: EvaluationResult, log: Log) -> None:
    """Add a result to a W&B run of its own, in the group of the training run.

    Training may still be logging, and W&B does not support two processes that write to one run. The x axis of both runs
    is the iteration, which may also decrease.
    """
    identity = {
        "project": config.wandb_project,
        "entity": config.wandb_entity,
        "name": f"{config.name} evaluation",
        "id": f"{run_id(run)}-evaluation",
        "group": config.name,
        "job_type": "evaluation",
        "config": to_dict(config),
    }
    experiment = open_run(run.root, identity, log)
    if experiment is not None:
        experiment.scalars(result.iteration, numbers(result))
        experiment.close()

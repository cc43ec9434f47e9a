"""The stages of a run's data (data.stages), by iterations and by samples."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from trainer.contract.config import BlendConfig, DataStage, TrainingConfig
from trainer.contract.model.batch_size import end_of_run


@dataclass(frozen=True)
class StageEnd:
    """A stage that the run has not completed."""

    stage: DataStage | None
    """None for a run without stages, which has one mixture."""
    end: int
    """Number of samples that the run will have read at the end of the stage."""


def stage_at(data: BlendConfig, iteration: int) -> DataStage | None:
    """The stage of the step with this number, counted from 1. None for a run without stages."""
    return next((stage for stage in data.stages if ends_after(stage, iteration - 1)), None)


def ends_after(stage: DataStage, iteration: int) -> bool:
    """True if `iteration` is not the end of the stage or later."""
    return stage.until_iter is None or stage.until_iter > iteration


def stages_left(
    data: BlendConfig, training: TrainingConfig, iteration: int, consumed_samples: int
) -> list[StageEnd]:
    """The stages from the current one to the last one that the run reaches, for a run that has completed `iteration`
    steps and read `consumed_samples`."""
    end = end_of_run(training, iteration, consumed_samples)
    if not data.stages:
        return [StageEnd(None, end)]
    found: list[StageEnd] = []
    for stage in data.stages:
        if stage.until_iter is None or stage.until_iter >= training.train_iters:
            return [*found, StageEnd(stage, end)]
        if ends_after(stage, iteration):
            until = dataclasses.replace(training, train_iters=stage.until_iter)
            found.append(StageEnd(stage, end_of_run(until, iteration, consumed_samples)))
    return found

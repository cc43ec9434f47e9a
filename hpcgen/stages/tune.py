"""The stage tune: measures the run and its candidates on the nodes of the training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.calibration import calibration_config
from hpcgen.planning.config_text import config_text
from hpcgen.planning.kind import Export, Stage, Work
from hpcgen.planning.measured_file import measured_on
from hpcgen.planning.request import make_allocation, place_of
from hpcgen.planning.trials import make_trials
from hpcgen.stages.train import TRAIN
from trainer.contract.calibration import CalibrationConfig
from trainer.contract.config import TrainerConfig
from trainer.contract.trials import DIRECTORY, TrialsConfig, trial_key

STEP_MARGIN_MINUTES = 5
"""Time for the start and the end of a step, in addition to the time limit of its trial or to the calibration's time."""
TRIALS_FILE = "tune.config.json"
CALIBRATION_FILE = "calibration.config.json"


class Tune(Stage):
    """Runs trainer.trials, a step for each trial."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Runs each trial on all nodes, one after another. Reads no data."""
        arguments = ("-m", "trainer.trials")
        if trainer is None:
            return Work(arguments=arguments)
        trials = TrialsConfig(
            warmup_steps=config.tune.warmup_steps,
            steps=config.tune.steps,
            time_limit_s=60 * config.tune.trial_minutes,
            trials=make_trials(self, run, config, allocation, trainer),
        )
        calibration = _calibration(run, config, allocation, [trial.trainer for trial in trials.trials])
        text = "" if calibration is None else config_text(calibration)
        result = f"{self.results(config)}/calibration-{trial_key(text)}.json"
        minutes = 0 if calibration is None else math.ceil(calibration.budget_s / 60) + STEP_MARGIN_MINUTES
        return Work(
            arguments=arguments,
            writes=(self.results(config),),
            files={TRIALS_FILE: config_text(trials), **({CALIBRATION_FILE: text} if text else {})},
            values={
                "trials": tuple(trial.key for trial in trials.trials),
                "trial_names": tuple(trial.name for trial in trials.trials),
                "trial_step_minutes": config.tune.trial_minutes + STEP_MARGIN_MINUTES,
                "calibration": result if text else "",
                "calibration_minutes": minutes,
            },
        )

    def problems(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields other numbers of nodes and tasks than those of the training."""
        own, training = (
            make_allocation(stage, config, run.cluster, run.node_type) for stage in (self, TRAIN)
        )
        for name in ("nodes", "ntasks_per_node"):
            if getattr(own, name) != (number := getattr(training, name)):
                place = place_of(self, name, config, run.cluster)
                reason = f"differs from the {number} of training, on whose nodes candidates are measured"
                yield place.problem(reason, f"remove it, or change slurm.train.{name}")

    def warnings(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Warns if only the run's own layout is measured, unless the file or hpcgen tune says so."""
        if run.document.get("tune.candidates") is None:
            reason = "names no layouts, so only the run's own is measured"
            yield Problem("tune.candidates", reason, "use hpcgen tune, which chooses layouts, or set it")

    def results(self, config: RunConfig) -> str:
        """The directory with a file for each trial."""
        return f"{config.paths.run_dir}/{DIRECTORY}"

    @property
    def environment_of(self) -> str:
        """Training, since its variables affect its speed."""
        return TRAIN.name

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Yields the variables of training."""
        yield from TRAIN.exports(run, config)


def _calibration(
    run: Run, config: RunConfig, allocation: Allocation, trainers: Sequence[TrainerConfig]
) -> CalibrationConfig | None:
    """Measurements for the predictions of these trainings. None if the cluster has all of them.

    Raises:
        HpcgenError: what was measured on the cluster cannot be read.
    """
    if not config.tune.calibrate:
        return None
    counts = allocation.ntasks_per_node, allocation.nvlink_nodes
    return calibration_config(trainers, run.node_type, *counts, measured=measured_on(run))


TUNE = Tune.of("tune")
STAGES = (TUNE,)

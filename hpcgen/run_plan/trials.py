"""The trials of a planned run: the candidates that a search chooses, and what is predicted for each."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from hpcgen.config.loader import Run, with_values
from hpcgen.errors import HpcgenError
from hpcgen.planning.memory import estimate_memory
from hpcgen.planning.predicted_step import NoPrediction, machine_of_run, predicted_step
from hpcgen.planning.request import make_allocation
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.machine import Machine
from hpcgen.run_plan.layouts.find import require_training, search_for
from hpcgen.run_plan.plan import Plan, plan
from hpcgen.stages.train import TRAIN
from hpcgen.stages.tune import TRIALS_FILE, TUNE
from hpcgen.text import counted
from trainer.contract.config import from_dict
from trainer.contract.model.layout import Layout
from trainer.contract.problem import in_yaml
from trainer.contract.record import record
from trainer.contract.trials import TrialConfig, TrialsConfig

STAGE = TUNE.name


@record(kw_only=True)
class Candidate:
    """A trial with its predictions. They are None where hpcgen cannot predict, as for CPUs."""

    trial: TrialConfig
    step_s: float | None
    """Seconds of a step."""
    memory_gib: float | None
    """Tensors on the fullest device."""


def with_candidates(run: Run, top: int) -> Run:
    """The run with the `top` fastest layouts of a search as its candidates, unless it names candidates itself.

    Raises:
        NoPrediction: there is no search, since the times are unknown. The hint says to name candidates.
        HpcgenError: the run has mistakes that no layout corrects, or no layout is estimated to fit.
    """
    if run.config.tune.candidates:
        return run
    require_training(run)
    try:
        _, found = search_for(run, top)
    except NoPrediction as error:
        hint = "name the layouts to measure in tune.candidates"
        raise NoPrediction(error.mistakes[0], hint) from error
    if not found.num_valid:
        plan(run, [STAGE])  # names the broken rules
    if not found.best:
        raise HpcgenError(
            f"no layout is estimated to fit the GPUs, of {counted(found.num_valid, 'valid layout')}",
            "use more nodes (hpcgen layouts says how many), or name the layouts to measure in tune.candidates",
        )
    texts = [_assignments(layout.changes) for layout in found.best]
    return with_values(run, {"tune.candidates": [text for text in texts if text]}, "hpcgen tune")


def _assignments(changes: Mapping[str, object]) -> str:
    """Assignments for --set, as words of a shell."""
    return shlex.join(f"{path}={in_yaml(value)}" for path, value in changes.items())


def candidates(plan: Plan) -> list[Candidate]:
    """The trials of a plan with the stage tune, the fastest prediction first."""
    text = plan.stages[STAGE].files[TRIALS_FILE]
    trials = from_dict(TrialsConfig, json.loads(text), TRIALS_FILE).trials
    return sorted((_predicted(plan.run, trial) for trial in trials), key=lambda each: each.step_s or 0.0)


def _predicted(run: Run, trial: TrialConfig) -> Candidate:
    trainer = trial.trainer
    try:
        machine = _machine(run)
        step_s = predicted_step(trainer, machine, trainer.training.global_batch_size).total
    except NoPrediction:
        return Candidate(trial=trial, step_s=None, memory_gib=None)
    layout = Layout.make(trainer.model, trainer.parallelism, trainer.training, trainer.world_size)
    assert layout is not None  # the rules have accepted it
    memory_gib = estimate_memory(Setup.of(trainer, layout)).total_gib
    return Candidate(trial=trial, step_s=step_s, memory_gib=memory_gib)


def _machine(run: Run) -> Machine:
    """The machine of the training.

    Raises:
        NoPrediction: see `machine_of_run`.
    """
    allocation = make_allocation(TRAIN, run.config, run.cluster, run.node_type)
    return machine_of_run(run, run.config.training, allocation)

"""The signal before the time limit of training, and whether the limit leaves time to train and to save."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpcgen.config.cluster import limits_of
from hpcgen.config.fields import seconds, slurm_time
from hpcgen.config.loader import Run
from hpcgen.config.profiles import is_set_by_site
from hpcgen.config.run import RunConfig
from hpcgen.config.slurm import LONGEST_LEAD_S
from hpcgen.errors import Problem
from hpcgen.planning import checkpointing
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.request import place_of
from hpcgen.stages.train import TRAIN
from hpcgen.text import duration
from trainer.contract.config import TrainerConfig
from trainer.contract.record import record


@record(kw_only=True)
class Timing:
    """How long the parts of an attempt take, in seconds."""

    startup_s: int
    step_s: float
    save_s: float
    evaluation_s: float
    asked_s: int
    """The configured lead of the signal; 0 if there is none."""

    @property
    def needed_s(self) -> int:
        """The shortest lead that leaves time to save."""
        return checkpointing.signal_lead_s(self.step_s, self.save_s, self.evaluation_s)

    @property
    def lead_s(self) -> int:
        """The lead of the signal before the time limit."""
        return max(self.asked_s, self.needed_s)

    @property
    def shortest_s(self) -> int:
        """The shortest time limit in which an attempt makes progress."""
        return checkpointing.shortest_time_s(self.lead_s, self.startup_s, self.step_s, self.save_s)

    def parts(self) -> str:
        """The parts of `needed_s`."""
        margin, step, save, evaluation = (
            duration(math.ceil(part_s))
            for part_s in (checkpointing.LEAD_MARGIN_S, self.step_s, self.save_s, self.evaluation_s)
        )
        last = f" + an evaluation of {evaluation}" if self.evaluation_s else ""
        return f"{margin} + 2 x (a step of {step} + a save of {save}){last}"


def timing(run: Run, trainer: TrainerConfig, allocation: Allocation) -> Timing:
    """The timing of a run's training."""
    step_s = checkpointing.slow_step_s(trainer)
    return Timing(
        startup_s=run.cluster.startup_time_s,
        step_s=step_s,
        save_s=checkpointing.save_time_s(trainer, run.cluster.storage_write_gb_s),
        evaluation_s=checkpointing.evaluation_s(trainer, step_s),
        asked_s=allocation.settings.signal_lead_s or 0,
    )


def time_problems(
    times: Timing, run: Run, config: RunConfig, allocation: Allocation
) -> tuple[list[Problem], list[Problem]]:
    """Errors about times that are too short to train or to save, and warnings.

    A shipped profile for a machine without Slurm, such as `local`, sets a limit that its users cannot extend. If only
    such a profile sets the limit, a warning about the slow steps replaces the errors.
    """
    problems = list(_problems(times, run, config, allocation))
    limit = place_of(TRAIN, "time", config, run.cluster)
    if limit.file != "cluster" or is_set_by_site(run.cluster_document, limit.path) or not problems:
        return problems, []
    reason = f"results in steps of about {duration(times.step_s)} on this machine"
    hint = "use a smaller model or batch, or a cluster profile with GPUs"
    return [], [Problem("training.global_batch_size", reason, hint)]


def _problems(times: Timing, run: Run, config: RunConfig, allocation: Allocation) -> Iterator[Problem]:
    lead = place_of(TRAIN, "signal_lead_s", config, run.cluster)
    limit = place_of(TRAIN, "time", config, run.cluster)
    if 0 < times.asked_s < times.needed_s <= LONGEST_LEAD_S:
        reason = (
            f"is too short to save a checkpoint, which takes {duration(times.needed_s)} ({times.parts()})"
        )
        yield lead.problem(reason, f"use at least {times.needed_s}")
    if times.needed_s > LONGEST_LEAD_S:
        reason = (
            f"leaves no time to save: the last checkpoint must start {duration(times.needed_s)} before the limit "
            f"({times.parts()}), and Slurm announces the limit at most {duration(LONGEST_LEAD_S)} before it"
        )
        if run.node_type.device == "cpu":
            reason = f"{reason}. Nodes of type {run.cluster.node_type} have no GPUs"
        yield limit.problem(reason, _faster(run))
    elif 0 < allocation.time_s < times.shortest_s:
        is_asked = times.asked_s > times.needed_s
        why = f"{lead.path} = {times.asked_s}" if is_asked else times.parts()
        reason = (
            f"leaves no time to train. Start-up takes {duration(times.startup_s)}, and the last checkpoint must start "
            f"{duration(times.lead_s)} before the limit ({why})"
        )
        shorter = f"set {lead.path} to {times.needed_s} or more" if is_asked else "use more nodes"
        yield limit.problem(reason, _longer(times, run, allocation, shorter))


def _faster(run: Run) -> str:
    smaller = "a smaller model or batch"
    if run.node_type.device == "cpu":
        return f"use a cluster profile with GPUs, or {smaller}"
    return f"use more nodes, or {smaller}"


def _longer(times: Timing, run: Run, allocation: Allocation, otherwise: str) -> str:
    """The hint to use a longer limit, unless the partition or the QOS does not allow it."""
    enough = slurm_time(times.shortest_s)
    limits = limits_of(allocation.settings, run.cluster)
    maxima = ((name, each.max_time) for name, each in limits if each.max_time)
    name, most = min(maxima, key=lambda limit: seconds(limit[1]), default=("", enough))
    if seconds(most) < times.shortest_s:
        return f"{otherwise}; the limit would have to be {enough}, and {name} allows {most}"
    return f"use at least {enough}" + (f", or {otherwise}" if times.asked_s > times.needed_s else "")

"""All checks of what a run needs, as far as this machine can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from hpcgen.config.loader import Run
from hpcgen.config.profiles import read_profile
from hpcgen.doctor import containers, partitions, slurm_settings, storage
from hpcgen.doctor.check import Check
from hpcgen.errors import HpcgenError
from hpcgen.run_plan.plan import Plan
from hpcgen.run_plan.plan import plan as plan_run
from hpcgen.run_plan.profile import profile_mistakes, profile_warnings
from hpcgen.slurm.programs import Settings, ask, ask_settings
from hpcgen.slurm.refusal import advice

Render = Callable[[Plan, str], str]
"""Renders the script of a stage (`hpcgen.api.render`)."""


def checks(run: Run, stage: str, render: Render) -> Iterator[Check]:
    """Yields the checks of a stage of a run, one after another."""
    plan = None
    try:
        plan = plan_run(run, [stage])
    except HpcgenError as error:
        for mistake in error.mistakes:
            yield Check("run file", "failed", str(mistake), "Correct it: the other checks need a valid plan.")
    yield from _profile(run, plan.warnings if plan else ())
    settings, problem = ask_settings()
    yield _reached(settings, problem)
    if plan is None:
        return
    yield Check("run file", "ok", f"plans {stage} on cluster {run.cluster_name}")
    if settings:
        yield from slurm_settings.checks(settings, plan)
        yield from _partition(plan, stage, render)
    yield from containers.checks(plan, settings)
    yield from containers.image_checks(plan)
    yield from storage.checks(plan)


def _profile(run: Run, planned: tuple[str, ...]) -> Iterator[Check]:
    """Yields what `hpcgen cluster check` finds in the profile and its node type, and the warnings of the plan."""
    for mistake in profile_mistakes(read_profile(run.config.cluster)):
        yield Check(
            "profile", "failed", str(mistake), f"Correct it: hpcgen cluster check {run.cluster_name}."
        )
    of_profile = profile_warnings(run.config.cluster, Path.cwd())
    for warning in dict.fromkeys((*of_profile, *planned)):
        yield Check("profile" if warning in of_profile else "run file", "warning", warning)


def _reached(settings: Settings, problem: str) -> Check:
    if problem:
        return Check("Slurm", "failed", problem, "Run this on a login node of the cluster.")
    return Check("Slurm", "ok", f"cluster {settings.get('ClusterName', 'unknown')} answers")


def _partition(plan: Plan, stage: str, render: Render) -> Iterator[Check]:
    rows, nodes = (
        partitions.rows(ask("scontrol", "show", kind, "--oneliner").lines) for kind in ("partition", "node")
    )
    yield from partitions.checks(plan.stages[stage], rows, nodes)
    yield _accepted(plan, stage, render)


def _accepted(plan: Plan, stage: str, render: Render) -> Check:
    """Asks Slurm whether it would take the stage's script. Queues nothing."""
    name = f"sbatch --test-only {stage}"
    try:
        script = render(plan, stage)
    except HpcgenError as error:
        return Check(name, "failed", str(error), "Correct it: the script cannot be rendered.")
    answer = ask("sbatch", "--test-only", given=script)
    said = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in answer.all_lines)
    if answer.problem:
        hint = advice(said, plan, plan.stages[stage])
        fix = f"{hint[:1].upper()}{hint[1:]}." if hint else "See what sbatch says."
        return Check(name, "failed", said or answer.problem, fix)
    return Check(name, "ok", said or "accepted")

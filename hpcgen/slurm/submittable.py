"""Stages that cannot run where they would be submitted to, refused before any of them starts. Needs no submitit."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from hpcgen.errors import ConfigErrors, HpcgenError
from hpcgen.planning.request import place_of
from hpcgen.run_plan.plan import Plan, located_in
from hpcgen.run_plan.stage import StagePlan


def require_this_machine(plan: Plan) -> None:
    """Refuses stages that cannot run here.

    Raises:
        HpcgenError: a stage needs several nodes, a container or a script of the nodes.
        PackageNotFoundError: a stage runs the trainer, and torch or megatron-core is not installed.
    """
    for stage in plan.stages.values():
        if stage.allocation.nodes > 1 or stage.container is not None or stage.environment_script:
            raise HpcgenError(_beyond_this_machine(stage), "use --launcher slurm, or set cluster: local")
        if stage.kind.reads_trainer_config:
            _require_trainer()


def _require_trainer() -> None:
    from importlib.metadata import PackageNotFoundError  # imports email and socket

    for module, package in (("torch", "torch"), ("megatron", "megatron-core")):
        if find_spec(module) is None:
            raise PackageNotFoundError(package)


def _beyond_this_machine(stage: StagePlan) -> str:
    what = f"{stage.allocation.nodes} nodes"
    if stage.allocation.nodes <= 1 and stage.container is not None:
        what = f"a container ({stage.container.runtime}, {stage.container.title})"
    elif stage.allocation.nodes <= 1:
        what = f"the environment script {stage.environment_script} of its nodes"
    return (
        f"stage {stage.name} requests {what}, but --launcher local runs on this machine, without containers"
    )


def require_no_chain(plan: Plan, stages: Sequence[StagePlan], what: str, hint: str) -> None:
    """Refuses stages that run in a chain of jobs if something waits for them: Slurm would start it after the first job.

    Raises:
        ConfigErrors: a stage does.
    """
    for stage in stages:
        if "chain" in stage.values:
            place = place_of(stage.kind, "chain", plan.run.config, plan.run.cluster)
            reason = f"lets jobs follow each other, so {what} can wait for {stage.name}"
            raise ConfigErrors([located_in(plan.run, place.problem(reason, hint))])

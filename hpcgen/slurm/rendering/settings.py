"""Settings of a batch script: shell variables with all values of the run that the script's code reads."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.fabric import needs_memlock
from hpcgen.planning.environment import leaked_patterns, library_path
from hpcgen.planning.slurm_variables import kept_variables
from hpcgen.run_plan.plan import Plan
from hpcgen.run_plan.stage import StagePlan
from trainer.contract.record import record

LIBRARY_PATH = 'export LD_LIBRARY_PATH="$1${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; shift; exec "$@"'
"""Follows the words that start the container, because only a shell in the task knows the image's LD_LIBRARY_PATH."""

Value = str | int | Sequence[str]


@record
class Setting:
    """A shell variable: a scalar, or an array of words."""

    name: str
    value: Value


def stage_settings(plan: Plan, stage: StagePlan) -> tuple[Setting, ...]:
    """The settings of a stage's script, in the order of the script."""
    config = plan.config
    runs_other = stage.kind.runs_own_files or stage.kind.runs_user_program
    values: dict[str, Value] = {
        "run_name": config.name,
        "stage": stage.name,
        "run_dir": config.paths.run_dir,
        "share": config.share,
        "directories": stage.directories,
        "striped_directories": stage.striped_directories,
        "stripe": _stripe(plan.run.cluster) if stage.striped_directories else (),
        **({"modules": stage.modules} if stage.modules else {}),
        "scratch_root": plan.run.cluster.scratch,
        "required": stage.required_everywhere(),
        "check_memlock": int(stage.device == "cuda" and needs_memlock(plan.run.node_type)),
        "secrets": stage.secrets,
        "leaks": " ".join(leaked_patterns(config, plan.run.cluster)),
        "kept_variables": " ".join(kept_variables(stage.directives)),
        "nodes": stage.allocation.nodes,
        **({"ntasks_per_node": stage.allocation.ranks_per_node} if stage.kind.has_ranks else {}),
        **_rendezvous(plan, stage),
        **stage.values,  # type: ignore[dict-item]
        **_container(plan, stage),
        "step": stage.allocation.srun_options(),
        "task": (*(() if runs_other else (stage.python,)), *stage.arguments),
    }
    return tuple(Setting(name, value) for name, value in values.items())


def has_preflight(stage: StagePlan) -> bool:
    """True if the stage checks its nodes before it starts and excludes bad ones."""
    return stage.kind.has_attempts and stage.checks_nodes


def _rendezvous(plan: Plan, stage: StagePlan) -> dict[str, Value]:
    """The profile's rule for the address at which the ranks meet, if it has one."""
    rule = plan.run.cluster.rendezvous
    if rule is None or not stage.kind.has_ranks:
        return {}
    return {
        "rendezvous_rule": ("suffix", rule.suffix) if rule.suffix else ("interface", rule.interface or "")
    }


def _stripe(cluster: ClusterConfig) -> tuple[str, ...]:
    """Options of lfs setstripe for new directories. -E -1: files have this layout from the beginning to the end."""
    stripe = cluster.stripe
    return () if stripe is None else ("-E", "-1", "-c", str(stripe.count), "-S", stripe.size)


def _container(plan: Plan, stage: StagePlan) -> dict[str, Value]:
    container = stage.container
    library = ":".join(library_path(stage.kind, plan.run))
    after = ("sh", "-c", LIBRARY_PATH, "library_path", library) if library else ()
    if container is None:
        return {"container": after}
    image: dict[str, Value] = {"image": container.image} if container.image_is_file else {}
    of_runtime = container.kind.settings(container) if container.kind.settings else {}
    return {**image, "container": (*container.words(), *after), **of_runtime}

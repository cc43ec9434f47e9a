"""Slurm's refusals of a job, and the keys that decide them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.planning.request import Setting, place_of
from hpcgen.run_plan.plan import Plan
from hpcgen.run_plan.stage import StagePlan
from hpcgen.text import one_of

# fmt: off
REFUSALS = (
    ("unrecognized option|invalid option|Invalid --|license|node name|wckey", ("extra_directives",)),
    ("SubmitJob", ("qos", "account")),
    ("MaxWall", ("time",)),
    ("M(ax|in)Node", ("nodes",)),
    ("accounting/QOS policy", ("nodes", "time", "num_tasks", "qos", "account")),
    ("Invalid account", ("account", "partition")),
    ("Invalid qos", ("qos",)),
    ("reservation", ("reservation",)),
    ("node configuration", ("nodes", "ntasks_per_node", "cpus_per_task", "mem", "constraint", "gres")),
    ("partition", ("partition", "nodes", "time")),
    ("time limit", ("time",)),
    ("node count", ("nodes",)),
    ("memory", ("mem",)),
    ("processors|CPU count", ("ntasks_per_node", "cpus_per_task")),
    ("feature", ("constraint",)),
    ("gres", ("gres",)),
)
# fmt: on
"""Patterns of Slurm's messages (slurm_errno.c and sbatch's options), each with the settings that decide the answer.
The first that matches counts."""


def advice(answer: str, plan: Plan, stage: StagePlan) -> str:
    """Hint after an answer of sbatch: the keys that decide it, with their values; "" if none does."""
    if "job array" in answer:
        where = plan.run.cluster_document.origin("max_array_size") or plan.run.cluster_files[0]
        return (
            f"set max_array_size in the cluster profile ({plan.run.cluster.max_array_size} now, {where}) to "
            "MaxArraySize of `scontrol show config`"
        )
    if re.search("temporarily|queue full", answer):
        return "try again later: Slurm keeps at most MaxJobCount jobs (see `scontrol show config`)"
    names = next((names for pattern, names in REFUSALS if re.search(pattern, answer, re.IGNORECASE)), ())
    keys = tuple(_keys(names, plan, stage))
    hint = f"this depends on {one_of(keys)}" if keys else ""
    if "SubmitJob" in answer:
        full = "the account or QOS takes no more jobs now, and each task of an array counts"
        return f"{full}: submit again when jobs have ended (squeue --me); {hint}"
    return hint


def _keys(names: tuple[str, ...], plan: Plan, stage: StagePlan) -> Iterator[str]:
    """Yields the first setting, and the other settings that have a value, each with its value and its place."""
    settings, run = stage.allocation.settings, plan.run
    others = (name for name in names[1:] if name == "gres" or getattr(settings, name, None) is not None)
    for name in (*names[:1], *others):
        place = (
            Setting("gres", "cluster")
            if name == "gres"
            else place_of(stage.kind, name, run.config, run.cluster)
        )
        value = run.cluster.gres if name == "gres" else getattr(settings, name)
        document = run.cluster_document if place.file == "cluster" else run.document
        where = document.origin(place.path)
        shown = " ".join(value) if isinstance(value, tuple) else value
        yield (
            f"{place.path} (not set)"
            if value in (None, ())
            else f"{place.path} = {shown} ({where or 'default'})"
        )
